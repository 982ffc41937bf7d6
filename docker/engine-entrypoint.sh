#!/bin/sh
# vllm-fork serve; writes the tiny hybrid model first where it is asked for and missing.
set -eu

tiny=/models/tiny-hybrid
if [ "${1:-}" = "$tiny" ] && [ ! -e "$tiny" ]; then
    rm -rf "$tiny.new"
    vllm-fork tiny-model "$tiny.new"
    mv "$tiny.new" "$tiny"
fi
exec vllm-fork serve "$@"
