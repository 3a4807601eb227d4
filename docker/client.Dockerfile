# Actors and learners: the client and the examples, without TensorFlow. Build it at the root of the repository:
#
#   docker build --file docker/client.Dockerfile --tag reverb-writer-client .
#
# Any CPython from 3.10 on will do: --build-arg PYTHON=3.12. The versions are those of constraints/client.txt.

ARG PYTHON=3.13
FROM python:${PYTHON}-slim-bookworm AS build
RUN python -m venv /opt/venv
COPY constraints/client.txt /build/constraints.txt
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --requirement /build/constraints.txt
COPY pyproject.toml README.md LICENSE CHANGELOG.md /build/
COPY reverb_writer /build/reverb_writer
COPY examples /build/examples
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation /build \
    && /opt/venv/bin/pip uninstall --yes --quiet hatchling pip

ARG PYTHON=3.13
FROM python:${PYTHON}-slim-bookworm
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin replay
COPY --from=build /opt/venv /opt/venv
COPY examples /app/examples
ENV PATH=/opt/venv/bin:$PATH TZ=UTC PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 10001
# Python as process 1 gets SIGTERM only if it asks for it; SIGINT ends actor and learner in order.
STOPSIGNAL SIGINT
CMD ["reverb-writer", "--help"]
