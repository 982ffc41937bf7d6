"""For every test: nothing is fetched, nothing is reported, nothing is inherited."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
# Two cores are shared by engines, services and a browser: do not spin on them.
os.environ["KMP_BLOCKTIME"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Two OpenMP threads that wait for each other take a hundred times as long as soon as
# anything else runs on one of two cores; the tiny model needs no second one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
for name in list(os.environ):
    # A developer's own settings must not decide what a test sees.
    if name.startswith(("OTEL_", "EVENT_CONSUMER_", "VLLM_FORK_", "VLLM_CHECKPOINT_")):
        del os.environ[name]
