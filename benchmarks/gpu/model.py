"""The engine under test: the shape of a 35B-A3B hybrid model, or a tiny stand-in.

The weights are random from a fixed seed and written *into the loaded model*: vLLM's
dummy weights give one token for ever, and 70 GB of real ones need not travel. They
are drawn before anything is timed or compared, so that routing to experts, and what
a wrong state would do to the output, are those of a model that listens.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# Before vLLM is imported: one process, no network, no FlashInfer.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BLOCK_SIZE = 1056
"""Tokens of a block of the 35B-A3B shape with a float32 recurrent state."""

ADDS_TO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "w2_weight")
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]


WORKERS_APART = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # they inherit nothing that we wrapped
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # NVLink multicast can put GPUs that others share out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Environment of an engine whose workers are processes of their own."""


def start_large(
    folder: Path,
    num_layers: int | None,
    settings: dict[str, Any],
    tensor_parallel: int = 1,
) -> Any:
    """Start the 35B-A3B shape (``num_layers`` of its 40) on a GPU, or on several."""
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
        Qwen3_5MoeTextConfig,
    )

    config = Qwen3_5MoeTextConfig().to_dict()
    config["architectures"] = ["Qwen3_5MoeForCausalLM"]
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        config["layer_types"] = config["layer_types"][:num_layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    engine = _start(
        settings,
        folder,
        tensor_parallel,
        load_format="dummy",
        skip_tokenizer_init=True,
        mamba_ssm_cache_dtype="float32",
        gdn_prefill_backend="triton",
        max_model_len=24576,
        max_num_batched_tokens=16384,
        max_num_seqs=128,
        gpu_memory_utilization=0.92,
        compilation_config={"cudagraph_capture_sizes": CAPTURE_SIZES},
    )
    draw_weights(engine, seed=1)
    return engine


def start_tiny(folder: Path, settings: dict[str, Any], tensor_parallel: int = 1) -> Any:
    """Start the tiny model on a CPU: tries the scripts, measures nothing."""
    from vllm_fork.tiny_model import write_tiny_model

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    write_tiny_model(folder)
    engine = _start(
        settings,
        folder,
        tensor_parallel,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
    )
    if tensor_parallel > 1:  # else its own weights do
        draw_weights(engine, seed=1)
    return engine


def _start(
    settings: dict[str, Any], folder: Path, tensor_parallel: int, **arguments: Any
) -> Any:
    """An engine core in this process with the overlay on, activated as vLLM's plugins
    are. Workers that are processes of their own load the plugin by themselves."""
    os.environ["VLLM_CHECKPOINT_RETENTION"] = json.dumps(settings)
    if tensor_parallel > 1:
        os.environ |= {
            name: os.environ.get(name, value) for name, value in WORKERS_APART.items()
        }
        _declare_plugin(folder.parent / "plugin")
        arguments |= {
            "tensor_parallel_size": tensor_parallel,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
    from vllm_fork import block_copy, plugin

    plugin.register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    block_copy.install()
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            prefix_match_unit=16,
            disable_log_stats=True,
            max_logprobs=128,
            seed=0,
            **arguments,
        ),
        enable_multiprocessing=False,
    )


def _declare_plugin(folder: Path) -> None:
    """Put the metadata of an installed package on the path of this process and of
    those that it starts, where the project runs from a mere checkout."""
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    (plugin,) = project["entry-points"][group].items()
    if entry_points(group=group, name=plugin[0]):
        return
    about = folder.resolve() / "vllm_fork-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    (about / "METADATA").write_text(metadata)
    (about / "entry_points.txt").write_text(f"[{group}]\n{' = '.join(plugin)}\n")
    here = [str(root), str(about.parent)]
    sys.path += here
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), *here]
    )


def core_of(engine: Any) -> Any:
    """The ``EngineCore`` that runs in this process."""
    return engine.engine_core.engine_core


def runner_of(engine: Any) -> Any:
    """The model runner of the one worker, in this process."""
    return core_of(engine).model_executor.driver_worker.worker.model_runner


def of_workers(engine: Any, ask: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``ask(worker, *args)`` gives in each worker, by rank."""
    found: list[Any] = core_of(engine).model_executor.collective_rpc(ask, args=args)
    return found


def redraw(engine: Any, branch: float, router: float, seed: int = 1) -> dict[str, Any]:
    """Draw the weights again, with other gains; an experiment of its own."""
    draw_weights(engine, seed, branch, router)
    return {"branch": branch, "router": router}


def draw_weights(
    engine: Any, seed: int, branch: float = 0.25, router: float = 4.0
) -> None:
    """Overwrite every parameter, in place: CUDA graphs keep their addresses.

    ``branch`` scales what a layer adds to the residual stream, ``router`` the logits
    of the experts. With 1 and 1 forty layers are chaotic: the rounding of a decode
    step against a prefill changes the output as much as another token would.
    """
    of_workers(engine, _draw, seed, branch, router)


def _draw(worker: Any, seed: int, branch: float, router: float) -> None:
    """Parameters that every worker holds whole get the same values in all of them,
    shards different ones."""
    import torch

    parallel = worker.vllm_config.parallel_config
    shards = parallel.tensor_parallel_size
    model = worker.model_runner.get_model()
    whole = _held_whole(model) if shards > 1 else set()
    generators: dict[tuple[torch.device, int], torch.Generator] = {}

    def generator(parameter: torch.Tensor) -> torch.Generator:
        own = seed + (1 + worker.rank if shards > 1 else 0)
        key = parameter.device, seed if id(parameter) in whole else own
        if key not in generators:
            generators[key] = torch.Generator(key[0]).manual_seed(key[1])
        return generators[key]

    gemma = {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ == "GemmaRMSNorm"
        for parameter in module.parameters(recurse=False)
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = generator(parameter)
            if id(parameter) in gemma:  # scales by 1 + weight
                parameter.zero_()
            elif name.endswith("A_log"):
                parameter.uniform_(0.005, 0.205, generator=random).log_()
            elif name.endswith("dt_bias"):
                parameter.normal_(-2.0, 0.3, generator=random)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 1.0, generator=random)
            elif parameter.dim() >= 2:
                gain, inputs = 3.0 if "lm_head" in name else 1.0, parameter.shape[-1]
                if any(part in name for part in ADDS_TO_RESIDUAL):
                    gain = branch
                    inputs *= shards  # the shards' results are added up
                elif name.endswith("mlp.gate.weight"):
                    gain = router
                parameter.normal_(0.0, gain / inputs**0.5, generator=random)
            else:
                parameter.fill_(1.0)


def _held_whole(model: Any) -> set[int]:
    """Ids of the parameters that tensor parallelism does not split."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, ReplicatedLinear) or getattr(module, "disable_tp", False)
        for parameter in module.parameters(recurse=False)
    }


def describe(engine: Any) -> dict[str, Any]:
    """Machine, versions, and what decides whether runs can be compared."""
    import torch
    import vllm

    core = core_of(engine)
    manager = core.scheduler.kv_cache_manager
    first, *others = of_workers(engine, _describe_worker)
    return {
        "machine": first.pop("machine"),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "workers": 1 + len(others),
        "model_runner": first.pop("model_runner"),
        "scheduler": type(core.scheduler).__name__,
        "async_scheduling": core.batch_queue is not None,
        "cudagraph_mode": str(core.vllm_config.compilation_config.cudagraph_mode),
        "num_layers": core.vllm_config.model_config.hf_text_config.num_hidden_layers,
        "block_size": manager.coordinator.scheduler_block_size,
        "hash_unit": manager.block_pool.hash_block_size,
        "num_blocks": manager.block_pool.num_gpu_blocks,
        **first,
    }


def _describe_worker(worker: Any) -> dict[str, Any]:
    import platform

    import torch

    from vllm_fork.block_copy import truncated_bytes

    runner = worker.model_runner
    blocks = runner.kv_cache_config.num_blocks
    storages = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
        for cache in runner.kv_caches
    }
    cuda = torch.cuda.is_available()
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor(),
        "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "bytes_per_block": sum(storages.values()) // blocks,
        "stock_copy_leaves_bytes": truncated_bytes(runner.kv_caches, blocks),
    }


def workers(engine: Any) -> dict[str, Any]:
    """Each worker's process, whether it lives, and what the plugin did in it."""
    executor = core_of(engine).model_executor
    processes = [worker.proc for worker in getattr(executor, "workers", ())]
    rows = of_workers(engine, _look_at_worker)
    for row, process in zip(rows, processes, strict=bool(processes)):
        row["alive"] = process.is_alive() and process.pid == row["pid"]
    return {
        "engine_pid": os.getpid(),
        "failed": getattr(executor, "is_failed", False),
        "rows": rows,
    }


def _look_at_worker(worker: Any) -> dict[str, Any]:
    import torch

    from vllm_fork.block_copy import HELPER, HOLDERS

    model = worker.model_runner.get_model()
    whole = _held_whole(model)
    sums = {True: 0.0, False: 0.0}
    for parameter in model.parameters():
        sums[id(parameter) in whole] += float(
            parameter.detach().sum(dtype=torch.float64)
        )
    helpers = {
        name: getattr(getattr(sys.modules[name], HELPER), "_copies_whole_pages", False)
        for name in HOLDERS
        if hasattr(sys.modules.get(name), HELPER)
    }
    return {
        "rank": worker.rank,
        "pid": os.getpid(),
        "plugin_found": [
            found.value
            for found in entry_points(group="vllm.general_plugins")
            if found.name == "vllm_fork"
        ],
        "copies_whole_pages": all(helpers.values()) and bool(helpers),
        "sum_of_whole_parameters": sums[True],
        "sum_of_shards": sums[False],
        "multicast_off": os.environ.get("NCCL_NVLS_ENABLE") == "0",
        "device": torch.cuda.current_device() if torch.cuda.is_available() else "cpu",
    }
