# Actors and learners: the client and the examples, without TensorFlow. Build it at the root of the repository:
#
#   docker build --file docker/client.Dockerfile --tag reverb-writer-client .
#
# The packages and their hashes are in constraints/client.txt, which `make lock` writes for CPython 3.12 or newer.
# For a build that can be repeated, name the base by its digest: docs/deploy/clusters.md.

ARG BASE=python:3.13-slim-bookworm
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/venv
COPY constraints/client.txt constraints/build.txt /build/constraints/
RUN pip --python /opt/venv/bin/python install --no-deps --require-hashes --requirement /build/constraints/client.txt \
    && pip install --no-deps --require-hashes --requirement /build/constraints/build.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md /build/
COPY reverb_writer /build/reverb_writer
COPY examples /build/examples
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels /build \
    && pip --python /opt/venv/bin/python install --no-deps --no-index /build/wheels/*.whl \
    && cyclonedx-py environment --output-file /opt/venv/sbom.cdx.json /opt/venv

FROM ${BASE}
RUN cd /usr/local && rm -rf bin/pip* bin/idle* bin/2to3* bin/wheel lib/python3.*/ensurepip lib/python3.*/idlelib \
    lib/python3.*/lib2to3 lib/python3.*/site-packages/*
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin replay
COPY --from=build /opt/venv /opt/venv
COPY examples /app/examples
ENV PATH=/opt/venv/bin:$PATH TZ=UTC PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 10001
CMD ["reverb-writer", "--help"]
