# The replay server. Build it at the root of the repository:
#
#   docker build --file docker/server.Dockerfile --tag reverb-writer-server .
#
# CPython 3.11 is the newest that dm-reverb has wheels for. The versions are those of constraints/server.txt.

FROM python:3.11-slim-bookworm AS build
RUN python -m venv /opt/venv
COPY constraints/server.txt /build/constraints.txt
# What takes minutes and seldom changes is a layer of its own. TensorFlow's headers and its dashboard are for people.
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --requirement /build/constraints.txt \
    && cd /opt/venv/lib/python3.11/site-packages \
    && rm -rf tensorflow/include tensorboard/webfiles.zip \
    && find . -name tests -type d -path '*numpy*' -prune -exec rm -rf {} +
COPY pyproject.toml README.md LICENSE CHANGELOG.md /build/
COPY reverb_writer /build/reverb_writer
COPY examples /build/examples
COPY server /build/server
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation /build /build/server

FROM python:3.11-slim-bookworm
# Reverb takes half the time for an item with it: docs/decisions/allocator.md.
RUN apt-get update && apt-get install --yes --no-install-recommends libjemalloc2 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin replay \
    && install -d -o replay -g replay /data
COPY --from=build /opt/venv /opt/venv
COPY docker/healthcheck /usr/local/bin/healthcheck
COPY docker/server.toml /etc/reverb-writer/server.toml
# Reverb names checkpoints by local time, which must not go back in autumn.
ENV PATH=/opt/venv/bin:$PATH TZ=UTC PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    REVERB_WRITER_CONFIG=/etc/reverb-writer/server.toml REVERB_WRITER__HTTP__ADDRESS_FILE=/tmp/reverb-writer-http
USER 10001
VOLUME /data
EXPOSE 8000 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 CMD ["/usr/local/bin/healthcheck"]
ENTRYPOINT ["reverb-writer-server"]
CMD ["serve"]
