# vLLM's CUDA image of the same release with this package on top.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
# pip's own settings, for a mirror or a certificate; they stay in this stage.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/ requirements/
RUN grep '^setuptools==' requirements/cpu.txt >build.txt \
    && python -m pip install --no-deps -r build.txt
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
USER root
COPY --from=build /wheels /wheels
# --no-deps: everything that runs in the engine comes with vLLM, and vLLM's own
# versions of it must stay. The last line fails the build where that is not so.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -r /wheels \
    && groupadd --gid 10001 app \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp app \
    && mkdir -p /models && chown app:app /models \
    && vllm-fork --version \
    && python3 -c 'import vllm_fork.events, vllm_fork.publisher, vllm_fork.config, vllm_fork.plugin'
ENV HOME=/tmp HF_HOME=/models/huggingface VLLM_CACHE_ROOT=/models/vllm-cache \
    PYTHONUNBUFFERED=1 DO_NOT_TRACK=1
VOLUME /models
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 5567 5568
ENTRYPOINT ["vllm-fork", "serve"]
