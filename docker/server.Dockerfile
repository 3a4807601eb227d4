# The replay server. Build it at the root of the repository:
#
#   docker build --file docker/server.Dockerfile --tag reverb-writer-server .
#
# CPython 3.11 is the newest that dm-reverb has wheels for. The packages and their hashes are in constraints/server.txt.
# For a build that can be repeated, name the base by its digest: docs/deploy/clusters.md.

ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/venv
COPY constraints/server.txt /build/constraints/
# What takes minutes and seldom changes is a layer of its own. TensorFlow's headers and symbols are for people.
RUN pip --python /opt/venv/bin/python install --no-deps --require-hashes --requirement /build/constraints/server.txt \
    && cd /opt/venv/lib/python3.11/site-packages \
    && rm -rf tensorflow/include \
    && find . -name tests -type d -path '*numpy*' -prune -exec rm -rf {} + \
    && strip --strip-unneeded tensorflow/libtensorflow_cc.so.2 tensorflow/libtensorflow_framework.so.2
COPY constraints/build.txt /build/constraints/
RUN pip install --no-deps --require-hashes --requirement /build/constraints/build.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md /build/
COPY reverb_writer /build/reverb_writer
COPY examples /build/examples
COPY server /build/server
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels /build /build/server \
    && pip --python /opt/venv/bin/python install --no-deps --no-index /build/wheels/*.whl \
    && cyclonedx-py environment --output-file /opt/venv/sbom.cdx.json /opt/venv

FROM ${BASE}
# Reverb takes half the time for an item with jemalloc: docs/decisions.md#allocator. Nothing is installed here later on.
RUN apt-get update && apt-get install --yes --no-install-recommends libjemalloc2 && rm -rf /var/lib/apt/lists/* \
    && cd /usr/local && rm -rf bin/pip* bin/idle* bin/2to3* bin/wheel lib/python3.*/ensurepip lib/python3.*/idlelib \
        lib/python3.*/lib2to3 lib/python3.*/site-packages/*
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin replay \
    && install -d -o replay -g replay /data /certificates
COPY --from=build /opt/venv /opt/venv
COPY docker/healthcheck /usr/local/bin/healthcheck
COPY docker/server.toml /etc/reverb-writer/server.toml
# Reverb names checkpoints by local time, which must not go back in autumn.
ENV PATH=/opt/venv/bin:$PATH TZ=UTC PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    REVERB_WRITER_CONFIG=/etc/reverb-writer/server.toml
# All interfaces of the container, whatever file is mounted: what is published of them, the engine decides.
ENV REVERB_WRITER__BIND=0.0.0.0 REVERB_WRITER__HTTP__HOST=0.0.0.0 REVERB_WRITER__HTTP__PORT=8080
USER 10001
WORKDIR /
VOLUME /data
EXPOSE 8000 8080
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 CMD ["/usr/local/bin/healthcheck"]
ENTRYPOINT ["reverb-writer-server"]
CMD ["serve"]
