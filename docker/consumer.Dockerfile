# The event consumer, and the client that plays the dialog: no torch, no vLLM.
# Built by docker-compose.yml; any builder reads it, the one before BuildKit too.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# pip's own settings, for a mirror or a certificate; they stay in this stage.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/ requirements/
RUN python -m venv --without-pip /opt/venv \
    && grep '^setuptools==' requirements/cpu.txt >build.txt \
    && python -m pip install --no-deps -r build.txt \
    && python -m pip --python /opt/venv/bin/python install --no-deps --no-compile \
        -r requirements/consumer.txt
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m pip --python /opt/venv/bin/python install --no-deps --no-compile /wheels/*.whl

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 app \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp app
COPY --from=build /opt/venv /opt/venv
# Compiled files go to the tmpfs: the image holds none, and its root is read-only.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=/tmp/pycache
WORKDIR /tmp
USER 10001:10001
EXPOSE 9464
ENTRYPOINT ["event-consumer"]
CMD ["run"]
