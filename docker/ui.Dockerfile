# The dashboard: Streamlit over the store, no torch, no vLLM.
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
        -r requirements/ui.txt
# What Streamlit, pandas and Plotly bring along and the dashboard never loads: tests,
# headers, symbols, stubs, notebook extensions, Arrow's Flight and S3 libraries, AVIF
# pictures, the maps' script, and copies of one shared library (wheels hold no links).
# That is half of the installation.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && cd /opt/venv/lib/python3.*/site-packages \
    && find numpy pandas pyarrow sqlalchemy -depth -type d '(' -name tests -o -name testing ')' \
        -not -path 'numpy/testing' -exec rm -r {} + \
    && rm -rf pyarrow/include pyarrow/src pydeck/nbextension/static plotly/labextension \
        plotly/package_data/plotly.min.js plotly/package_data/widgetbundle.js \
        numpy/f2py numpy/_core/lib numpy/_core/include /opt/venv/share/jupyter \
        PIL/_avif.* pillow.libs/libavif-* streamlit/static/static/js/DeckGlJsonChart.* \
    && find pyarrow -name '*flight*' -delete -o -name '*s3*' -delete \
        -o -name '*.pxi' -delete -o -name '*.pyx' -delete \
    && find . -name '*.pyi' -delete \
    && for library in pyarrow/*.so.*.*; do \
        ln -sf "${library##*/}" "${library%.*.*}" && ln -sf "${library##*/}" "${library%.*.*.*}"; \
    done \
    && find . -name '*.so*' -type f -not -path './*.libs/*' -exec strip --strip-unneeded {} +
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m pip --python /opt/venv/bin/python install --no-deps --no-compile /wheels/*.whl \
    && PYTHONDONTWRITEBYTECODE=1 /opt/venv/bin/python -c \
        'import streamlit.web.cli, altair, pydeck, pandas, pyarrow.compute, psycopg, ui.shell'

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 app \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp app
COPY --from=build /opt/venv /opt/venv
# Compiled files go to the tmpfs: the image holds none, and its root is read-only.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=/tmp/pycache
WORKDIR /tmp
USER 10001:10001
EXPOSE 8501
ENTRYPOINT ["python", "-m", "ui"]
CMD ["--address", "0.0.0.0", "--wait"]
