#!/usr/bin/env bash
# Put the parts of pack.sh that are in DIR into SITE, a folder for PYTHONPATH. May be
# run once with all parts or once a part.
#
#   unpack.sh DIR SITE
set -euo pipefail
dir=${1:?usage: unpack.sh DIR SITE}
site=${2:?usage: unpack.sh DIR SITE}
mkdir -p "$site/vllm/vllm_flash_attn"
if [ -d "$dir/part1" ]; then
  xz -dc "$dir/part1/C.xz" > "$site/vllm/_C_stable_libtorch.abi3.so"
fi
if [ -d "$dir/part2" ]; then
  tar -xJf "$dir/part2/py.tar.xz" -C "$site"
  xz -dc "$dir/part2/moe.xz" > "$site/vllm/_moe_C_stable_libtorch.abi3.so"
  xz -dc "$dir/part2/fa3.xz" > "$site/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
fi
if [ -d "$dir/part3" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$dir"/part3/*.whl
fi
