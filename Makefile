# Everything a developer or CI does, by name; `make help` lists it. Each target sets up what it needs.
#
#   .venv            CPython 3.11: client and server, editable, and the tools
#   .venv-tf-agents  CPython 3.11: the same beside TF-Agents 0.19, the peer of conformance tests and benchmarks
#   .venv-client     newest CPython here: the client alone, editable, with numpy, protobuf and grpcio as of the last `make lock`
#   .venv-rllib      CPython 3.11: the client beside RLlib of Ray 2.35, the peer of `Episode`
#   .venv-ray        CPython 3.11: the client beside Ray; its shards run on the servers of .venv
#   .venv-docs       any CPython: what builds the documentation and the distributions
#   .venv-frameworks CPython 3.11: the client beside PyTorch, JAX, Minari, and the peers of the returns
#   .venv-oldest     CPython 3.10: the built client alone, with the oldest releases that it promises to work with

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The interpreters can be given: make PYTHON311=/path/to/python3.11
PYTHON311 ?= $(shell scripts/find-python 3.11)
PYTHON310 ?= $(shell scripts/find-python 3.10)
PYTHON_DOCS ?= $(shell scripts/find-python 3.11 3.12 3.13 3.14)

CLIENT_EXTRAS := arrays,gymnasium
PEERS := tests/peers/pyproject.toml
DEV := --editable '.[$(CLIENT_EXTRAS),atari,demo,dm-env,mujoco]' --editable server --group dev --group bench --group browser
TF_AGENTS := --editable '.[$(CLIENT_EXTRAS),atari]' --editable server --group test --group bench \
	--group $(PEERS):conformance
FRAMEWORKS := --editable '.[$(CLIENT_EXTRAS),jax,minari,torch]' --group test --group $(PEERS):frameworks
RLLIB := --editable . --group $(PEERS):rllib
RAY := --editable '.[gymnasium,ray]' --group test
DOCS := --editable '.[$(CLIENT_EXTRAS),dm-env]' --group docs --group dist --group browser --group notebook \
	--group test
CLIENT := --editable '.[$(CLIENT_EXTRAS),demo,dm-env]' --group test
OLDEST := '.[$(CLIENT_EXTRAS)]' --group test

PROJECTS := pyproject.toml server/pyproject.toml $(PEERS) scripts/make-venv
CLIENT_TESTS := tests/unit tests/properties tests/integration
# Where dm-reverb cannot be installed, demo and tests run on the server in pure Python that the client brings.
PYTHON_ANY ?= $(shell scripts/find-python 3.14 3.13 3.12 3.11 3.10)
HAS_SERVER := $(and $(PYTHON311),$(filter Linux/x86_64,$(shell uname -s)/$(shell uname -m)))
SERVER_TESTS := tests/integration/server tests/conformance tests/docker

FRAMEWORK_TESTS := tests/{unit,properties}/{rollouts,transitions} tests/unit/{files,docs/test_docs_pages.py} \
	tests/integration/{files,rollouts,sb3} tests/integration/cli/test_cli_rollouts.py \
	tests/integration/{client/test_variables,docs/test_docs_programs,docs/test_examples}.py \
	tests/integration/reading/test_views.py

.PHONY: help demo test slow check format fuzz bench rllib ray newest oldest frameworks \
	docker soak docs links dist lock pin audit clean pictures

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

# Tests wait more often than they compute, so there are more processes than cores. WORKERS=0 is none but pytest itself.
WORKERS ?= 4
PARALLEL = --numprocesses $(WORKERS) --dist worksteal

ifneq ($(HAS_SERVER),)
demo: .venv/.made  ## server, actors and a learner on CartPole, live in the terminal
	@.venv/bin/reverb-writer demo

test: .venv/.made .venv-tf-agents/.made  ## the tests, on real servers, but for those marked `slow`
	$(call test-beside-peers,not slow)

slow: .venv/.made .venv-tf-agents/.made  ## the tests marked `slow`: with `make test` these are all
	$(call test-beside-peers,slow)

define test-beside-peers
	.venv/bin/pytest $(PARALLEL) -m '$(1)'
	.venv-tf-agents/bin/pytest $(PARALLEL) -m '$(1)' tests/conformance $(TF_AGENTS_PAGES)
endef

# The pages of the documentation that go further where TF-Agents is installed.
TF_AGENTS_PAGES = $(foreach page,$(shell grep -rl --include='*.md' 'needs: tf_agents' docs), \
	'tests/integration/docs/test_docs_programs.py::test_every_program_of_a_page_runs[$(page)]' \
	'tests/unit/docs/test_docs_pages.py::test_every_session_of_a_page_prints_what_the_page_says[$(page)]')
else
demo: .venv-client/.made
	@.venv-client/bin/reverb-writer demo

test slow: .venv-client/.made
	.venv-client/bin/pytest $(PARALLEL) -m '$(if $(filter slow,$@),slow,not slow)' reverb_writer $(CLIENT_TESTS)
	@echo "Left out, for want of CPython 3.11 on x86-64 Linux: every test that runs on dm-reverb's server (skipped above,"
	@echo "each with its other half on the local server), $(SERVER_TESTS)."
endif

check: .venv/.made  ## format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: .venv/.made  ## let ruff format and mend what it can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

fuzz: .venv/.made  ## a million damaged responses, a million damaged requests, weights of 1 GB, a checkpoint of 2 GB
	REVERB_WRITER_FUZZ=1000000 .venv/bin/pytest -o timeout=3600 tests/properties/{decoding/test_hostile_samples,local/test_hostile_requests}.py tests/properties/decoding/test_trajectory_parsing.py
	REVERB_WRITER_WEIGHTS_BYTES=1000000000 .venv/bin/pytest -o timeout=3600 tests/integration/reading/test_reading.py -k large_weights
	REVERB_WRITER_CHECKPOINT_MIB=2000 REVERB_WRITER_CHECKPOINT_ITEMS=1000000 .venv/bin/pytest tests/integration/server/test_service_faults.py -k long_save

bench: .venv-tf-agents/.made  ## measure ours and the peers in turn
	.venv-tf-agents/bin/python -m benchmarks

rllib: .venv-rllib/.made  ## compare and measure `Episode` beside RLlib, which is not part of `make test` for its size
	.venv-rllib/bin/pytest tests/rllib
	.venv-rllib/bin/pytest tests/integration/docs/test_docs_programs.py tests/unit/docs/test_docs_pages.py -k rllib
	.venv-rllib/bin/python -m benchmarks episode_steps episode_getters

ray: .venv/.made .venv-ray/.made  ## shards that Ray places: fake nodes on this machine, lost and restored
	REVERB_WRITER_SERVER_PYTHON=$(CURDIR)/.venv/bin/python .venv-ray/bin/pytest tests/ray_shards

newest: .venv-client/.made  ## the client's tests on the newest CPython here, on the server in pure Python
	.venv-client/bin/pytest $(PARALLEL) -m 'not slow' $(CLIENT_TESTS)

oldest: .venv/.made .venv-oldest/.made  ## the client's tests, built and installed, on CPython 3.10 with its oldest dependencies
	.venv-oldest/bin/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	REVERB_WRITER_SERVER_PYTHON=.venv/bin/python .venv-oldest/bin/pytest $(PARALLEL) $(CLIENT_TESTS)

frameworks: .venv/.made .venv-frameworks/.made  ## what works with PyTorch, JAX and Minari, which are too big for `make test`
	$(test-frameworks) -k 'not jax and not rlax'
	$(test-frameworks) -k 'jax or rlax'  # by itself: JAX has threads, so a process with it must not be forked

test-frameworks = REVERB_WRITER_SERVER_PYTHON=.venv/bin/python .venv-frameworks/bin/pytest $(PARALLEL) $(FRAMEWORK_TESTS)

docker: .venv/.made  ## the images and the compose file, with a real engine
	.venv/bin/pytest tests/docker

soak: .venv/.made  ## twenty minutes of random kills, pauses, restarts, interrupts and forks; the books balance
	PYTHONPATH=tests:tests/support .venv/bin/python -m soak --minutes $(or $(MINUTES),10) $(addprefix --seed ,$(SEED))
	PYTHONPATH=tests:tests/support .venv/bin/python -m soak.kills --kills $(or $(KILLS),50) $(addprefix --seed ,$(SEED))

docs: .venv-docs/.made  ## build the documentation site, with warnings as errors, and open all of it in a browser
	rm -rf docs/_build
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build
	REVERB_WRITER_SITE=$(CURDIR)/docs/_build .venv-docs/bin/pytest tests/integration/{docs/test_docs_site,docs/test_docs_programs,cli/test_progress}.py -k 'not every_program_of_a_page'
	@echo 'Open docs/_build/index.html, or let any static host serve that folder.'

links: .venv-docs/.made  ## ask every external link of the documentation for an answer; needs the network, so CI leaves it out
	.venv-docs/bin/python -m sphinx --builder linkcheck --quiet docs docs/_build/links

dist: .venv-docs/.made  ## build both distributions, check them, install them into clean environments and try them
	rm -rf dist .venv-dist
	for project in . server; do .venv-docs/bin/python -m build --outdir dist $$project >dist.log || { cat dist.log; exit 1; }; done
	rm dist.log
	.venv-docs/bin/python -m twine check --strict dist/*
	scripts/make-venv .venv-dist '$(PYTHON_ANY)' /dev/null dist/reverb_writer-*.whl
	cd dist && ../.venv-dist/bin/python -I ../scripts/try-client
ifneq ($(HAS_SERVER),)
	rm -rf .venv-dist
	scripts/make-venv .venv-dist '$(PYTHON311)' constraints/dev.txt dist/reverb_writer-*.whl dist/reverb_writer_server-*.whl
	cd dist && ../.venv-dist/bin/reverb-writer-server --version
endif
	rm -rf .venv-dist

lock: lock-dev lock-tf-agents lock-ray-tests lock-rllib lock-docs lock-newest  ## write constraints/ anew from what the registry has today
	sed -i 's/$$/ ; python_version >= "3.12"/' constraints/newest.txt  # older ones have other NumPys
	scripts/lock-images '$(PYTHON311)' '$(PYTHON_ANY)'

pin:  ## write the digests of the base images, as the registry has them today, into Dockerfiles and docker-compose.yml
	scripts/pin-bases docker/*.Dockerfile docker-compose.yml

audit:  ## compare the packages of the images with known vulnerabilities; needs the network
	test -x .venv-audit/bin/pip-audit || scripts/make-venv .venv-audit '$(PYTHON_ANY)' /dev/null pip-audit
	for name in server client ray build; do \
		.venv-audit/bin/pip-audit --disable-pip --require-hashes --requirement constraints/$$name.txt || found=1; \
	done; exit $${found:-0}

clean:  ## remove environments, caches and builds
	rm -rf .venv .venv-* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

pictures: .venv-docs/.made  ## draw the pictures of the documentation anew
	.venv-docs/bin/python docs/pictures.py docs/_static

define environment
$(1)/.made: $(PROJECTS) constraints/$(3).txt
	scripts/make-venv $(1) '$$(or $$($(2)),$$(error $$(NO_PYTHON)))' constraints/$(3).txt $(4)
	@touch $$@

lock-$(3):
	rm -rf .venv-lock-$(3)
	scripts/make-venv .venv-lock-$(3) '$$(or $$($(2)),$$(error $$(NO_PYTHON)))' /dev/null $(4)
	.venv-lock-$(3)/bin/pip freeze --all --exclude-editable > constraints/$(3).txt
	rm -rf .venv-lock-$(3)
endef
$(eval $(call environment,.venv,PYTHON311,dev,$(DEV)))
$(eval $(call environment,.venv-tf-agents,PYTHON311,tf-agents,$(TF_AGENTS)))
$(eval $(call environment,.venv-frameworks,PYTHON311,frameworks,$(FRAMEWORKS)))
$(eval $(call environment,.venv-rllib,PYTHON311,rllib,$(RLLIB)))
$(eval $(call environment,.venv-ray,PYTHON311,ray-tests,$(RAY)))
$(eval $(call environment,.venv-client,PYTHON_ANY,newest,$(CLIENT)))
$(eval $(call environment,.venv-docs,PYTHON_DOCS,docs,$(DOCS)))
$(eval $(call environment,.venv-oldest,PYTHON310,oldest,$(OLDEST)))

define NO_PYTHON
No interpreter was found for this environment; the head of the Makefile says which CPython each one needs, with venv.
The server needs 3.11 on x86-64 Linux: dm-reverb 0.14.0 has no wheels for anything newer. Any of these brings one:
  Debian 12:     apt install python3.11 python3.11-venv
  Ubuntu:        the same, from the deadsnakes archive
  anywhere:      pyenv install 3.11
  one elsewhere: make PYTHON311=/path/to/python3.11; the other names are PYTHON310, PYTHON_DOCS and PYTHON_ANY
`docker compose up` needs no Python at all. The client alone runs on CPython 3.10 to 3.14: pip install reverb-writer
endef
