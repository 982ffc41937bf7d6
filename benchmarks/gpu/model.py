"""The engine under test: the shape of a 35B-A3B hybrid model, or a tiny stand-in.

The weights are random from a fixed seed and written *into the loaded model*: vLLM's
dummy weights give one token for ever, and 70 GB of real ones need not travel. They
are drawn before anything is timed or compared, so that routing to experts, and what
a wrong state would do to the output, are those of a model that listens.
"""

from __future__ import annotations

import json
import os
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


def start_large(folder: Path, num_layers: int | None, settings: dict[str, Any]) -> Any:
    """Start the 35B-A3B shape (``num_layers`` of its 40) on a GPU."""
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
        model=str(folder),
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
    draw_weights(model_of(engine), seed=1)
    return engine


def start_tiny(folder: Path, settings: dict[str, Any]) -> Any:
    """Start the tiny model on a CPU: tries the scripts, measures nothing."""
    from vllm_fork.tiny_model import write_tiny_model

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    write_tiny_model(folder)
    return _start(
        settings,
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
    )


def _start(settings: dict[str, Any], **arguments: Any) -> Any:
    """An in-process engine with the overlay on, activated as vLLM's plugins are."""
    os.environ["VLLM_CHECKPOINT_RETENTION"] = json.dumps(settings)
    from vllm_fork import block_copy, plugin

    plugin.register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    block_copy.install()
    return LLMEngine.from_engine_args(
        EngineArgs(
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


def core_of(engine: Any) -> Any:
    """The ``EngineCore`` that runs in this process."""
    return engine.engine_core.engine_core


def runner_of(engine: Any) -> Any:
    """The model runner of the one worker."""
    return core_of(engine).model_executor.driver_worker.worker.model_runner


def model_of(engine: Any) -> Any:
    return runner_of(engine).get_model()


def redraw(engine: Any, branch: float, router: float, seed: int = 1) -> dict[str, Any]:
    """Draw the weights again, with other gains; an experiment of its own."""
    draw_weights(model_of(engine), seed, branch, router)
    return {"branch": branch, "router": router}


def draw_weights(
    model: Any, seed: int, branch: float = 0.25, router: float = 4.0
) -> None:
    """Overwrite every parameter, in place: CUDA graphs keep their addresses.

    ``branch`` scales what a layer adds to the residual stream, ``router`` the logits
    of the experts. With 1 and 1 forty layers are chaotic: the rounding of a decode
    step against a prefill changes the output as much as another token would.
    """
    import torch

    generators: dict[torch.device, torch.Generator] = {}

    def generator(device: torch.device) -> torch.Generator:
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        return generators[device]

    gemma = {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ == "GemmaRMSNorm"
        for parameter in module.parameters(recurse=False)
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = generator(parameter.device)
            if id(parameter) in gemma:  # scales by 1 + weight
                parameter.zero_()
            elif name.endswith("A_log"):
                parameter.uniform_(0.005, 0.205, generator=random).log_()
            elif name.endswith("dt_bias"):
                parameter.normal_(-2.0, 0.3, generator=random)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 1.0, generator=random)
            elif parameter.dim() >= 2:
                gain = 3.0 if "lm_head" in name else 1.0
                if any(part in name for part in ADDS_TO_RESIDUAL):
                    gain = branch
                elif name.endswith("mlp.gate.weight"):
                    gain = router
                fan_in = parameter.shape[-1]
                parameter.normal_(0.0, gain / fan_in**0.5, generator=random)
            else:
                parameter.fill_(1.0)


def describe(engine: Any) -> dict[str, Any]:
    """Machine, versions, and what decides whether runs can be compared."""
    import platform

    import torch
    import vllm

    from vllm_fork.block_copy import truncated_bytes

    core, runner = core_of(engine), runner_of(engine)
    manager = core.scheduler.kv_cache_manager
    blocks = manager.block_pool.num_gpu_blocks
    cuda = torch.cuda.is_available()
    storages = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
        for cache in runner.kv_caches
    }
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "scheduler": type(core.scheduler).__name__,
        "async_scheduling": core.batch_queue is not None,
        "cudagraph_mode": str(core.vllm_config.compilation_config.cudagraph_mode),
        "num_layers": core.vllm_config.model_config.hf_text_config.num_hidden_layers,
        "block_size": manager.coordinator.scheduler_block_size,
        "hash_unit": manager.block_pool.hash_block_size,
        "num_blocks": blocks,
        "bytes_per_block": sum(storages.values()) // blocks,
        "stock_copy_leaves_bytes": truncated_bytes(runner.kv_caches, blocks),
    }
