#!/usr/bin/env bash
# Pack vLLM's CUDA build for a GPU machine without a network: three parts of at most
# 60 MB, which unpack.sh puts together there.
#
#   benchmarks/gpu/pack.sh DEST
#
# The GPU machine has to have CPython 3.12 with torch 2.11 (CUDA 13), triton and
# transformers; vLLM's extensions use torch's stable ABI and load there. Needs pip,
# unzip, xz, 2 GB of disk. Keep DEST out of git (.gpu* is ignored).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dest=${1:?usage: pack.sh DEST}
version=0.32.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dest"/part1 "$dest"/part2 "$dest"/part3

python3 -m pip download -qq --no-deps -d "$work" "vllm==$version"
(cd "$work" && unzip -q vllm-*.whl)
pack() { xz -T0 -6 -c "$work/vllm/$1" > "$dest/$2"; }
pack _C_stable_libtorch.abi3.so part1/C.xz
pack _moe_C_stable_libtorch.abi3.so part2/moe.xz
pack vllm_flash_attn/_vllm_fa3_C.abi3.so part2/fa3.xz
tar -C "$work" --exclude='*.so' --exclude=vllm/vllm-rs \
  --exclude='vllm/third_party/*/include' \
  --exclude=vllm/third_party/fmha_sm100/cutlass --exclude='*.hpp' --exclude='*.cuh' \
  -cf - vllm "vllm-$version.dist-info" | xz -T0 -3 > "$dest/part2/py.tar.xz"

platforms=(--platform any)
for tag in manylinux_2_{39,34,31,28,27,24,17,12,5} manylinux{2014,2010,1}; do
  platforms+=(--platform "${tag}_x86_64")
done
python3 -m pip download -qq --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
  -d "$dest/part3" -r "$here/wheels.txt"
cp "$here/unpack.sh" "$dest"
du -sm "$dest"/part?
