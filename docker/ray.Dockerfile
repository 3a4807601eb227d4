# A node of a Ray cluster with room for shards: Ray at /opt/ray, the replay server at /opt/venv. Build it at the root of the
# repository, after the server's image:
#
#   docker build --file docker/server.Dockerfile --tag reverb-writer-server .
#   docker build --file docker/ray.Dockerfile --tag ray-replay .
#
# The packages and their hashes are in constraints/ray.txt, which `make lock` writes for CPython 3.11.

ARG BASE=python:3.11-slim-bookworm
ARG SERVER=reverb-writer-server
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/ray
COPY constraints/ray.txt constraints/build.txt /build/constraints/
RUN pip --python /opt/ray/bin/python install --no-deps --require-hashes --requirement /build/constraints/ray.txt \
    && pip install --no-deps --require-hashes --requirement /build/constraints/build.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md /build/
COPY reverb_writer /build/reverb_writer
COPY examples /build/examples
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels /build \
    && pip --python /opt/ray/bin/python install --no-deps --no-index /build/wheels/*.whl

FROM ${SERVER}
COPY --from=build /opt/ray /opt/ray
COPY docker/leave-ray /usr/local/bin/leave-ray
# KubeRay's probes call wget, and its start calls bash and ulimit.
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
USER 10001
ENV PATH=/opt/ray/bin:/usr/local/bin:/usr/bin:/bin HOME=/home/replay
HEALTHCHECK NONE
ENTRYPOINT []
CMD ["ray", "--help"]
