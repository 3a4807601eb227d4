# The gateway of the profile `tls`: Debian's nginx, on the base that the server has, so that one base is kept up to date.
# For a build that can be repeated, name the base by its digest: docs/deploy/clusters.md.

ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends nginx-light openssl \
    && rm -rf /var/lib/apt/lists/* \
    && cd /usr/local && rm -rf bin/pip* bin/idle* bin/2to3* bin/wheel lib/python3.*/ensurepip lib/python3.*/idlelib \
        lib/python3.*/lib2to3 lib/python3.*/site-packages/*
COPY docker/gateway /etc/gateway
ENV CERTIFICATES=/certificates
USER nobody
ENTRYPOINT ["/etc/gateway/run"]
