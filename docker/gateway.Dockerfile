# The gateway of the profile `tls`: Debian's HAProxy, on the base that the server has, so that one base is kept up to date.

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends haproxy \
    && rm -rf /var/lib/apt/lists/*
USER haproxy
STOPSIGNAL SIGUSR1
ENTRYPOINT ["haproxy", "-db", "-f", "/gateway.cfg"]
