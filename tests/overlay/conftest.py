"""Real CPU engines in this process, whose every block can be read."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vllm_fork import events, tiny_model
from vllm_fork.event_queue import made

FIRST_PLAIN_ID = len(tiny_model.CONTROL_TOKENS)


class Answer(NamedTuple):
    """``logprobs``: for each position, token id to log-probability (top 20)."""

    token_ids: list[int]
    num_cached_tokens: int
    finish_reason: str
    logprobs: list[dict[int, float]]


class CpuEngine:
    """An engine core in this process: its scheduler, its worker and their blocks."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        worker = self.core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        self.events: list[events.Event] = []
        observer = self.scheduler.observer
        observer.enabled = True
        observer._publish = lambda queued: self.events.extend(map(made, queued))

    @property
    def num_leaked_blocks(self) -> int:
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        high = tiny_model.VOCAB_SIZE
        ids = torch.randint(FIRST_PLAIN_ID, high, (length,), generator=generator)
        return ids.tolist()

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        cached: bool = True,
        stop_at: int | None = None,
    ) -> Answer:
        """Decode greedily; ``stop_at`` is a stop token, else length ends it."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=20,
            stop_token_ids=[] if stop_at is None else [stop_at],
            skip_reading_prefix_cache=not cached,
        )
        request = {"prompt_token_ids": list(prompt)}
        (output,) = self.llm.generate([request], params, use_tqdm=False)
        completion = output.outputs[0]
        return Answer(
            list(completion.token_ids),
            output.num_cached_tokens or 0,
            completion.finish_reason,
            [
                {token: entry.logprob for token, entry in position.items()}
                for position in completion.logprobs
            ],
        )

    def mamba_groups(self) -> list[int]:
        return list(self.scheduler.cache_index.mamba_group_ids)

    def state(self, group_id: int, block_id: int) -> list[torch.Tensor]:
        """A copy of every state tensor that one block of a Mamba group holds."""
        layers = self.runner.compilation_config.static_forward_context
        group = self.runner.kv_cache_config.kv_cache_groups[group_id]
        return [
            tensor[block_id].clone()
            for name in group.layer_names
            for tensor in layers[name].kv_cache
        ]


StartEngine = Callable[..., CpuEngine]


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts engines; the former one of the module is closed first."""
    running: list[CpuEngine] = []
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def close() -> None:
        while running:
            running.pop().core.shutdown()
            gc.collect()

    def start(
        settings: dict[str, Any],
        *,
        num_layers: int = 4,
        asynchronous: bool = False,
        **options: Any,
    ) -> CpuEngine:
        from vllm import LLM
        from vllm.config import VllmConfig
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        close()
        model = _model(tmp_path_factory, num_layers)
        patch.setenv(
            "VLLM_CHECKPOINT_RETENTION",
            json.dumps({"retain": True, "events": {"enabled": False}, **settings}),
        )
        with pytest.MonkeyPatch.context() as only_here:
            if asynchronous:
                # The CPU platform forces asynchronous scheduling off. Its
                # scheduler and a batch queue of two give the same order of
                # schedule() and update_from_output() on the real worker.
                only_here.setattr(
                    VllmConfig, "max_concurrent_batches", property(lambda self: 2)
                )
                options["scheduler_cls"] = AsyncScheduler
            llm = LLM(
                model=str(model),
                enable_prefix_caching=True,
                mamba_cache_mode="align",
                prefix_match_unit=16,
                max_model_len=4096,
                max_num_batched_tokens=2048,
                max_num_seqs=8,
                enforce_eager=True,
                disable_log_stats=True,
                **options,
            )
        engine = CpuEngine(llm)
        assert (engine.core.batch_queue is not None) is asynchronous
        running.append(engine)
        return engine

    yield start
    close()
    patch.undo()


def _model(factory: pytest.TempPathFactory, num_layers: int) -> Path:
    directory = factory.getbasetemp() / f"tiny-{num_layers}-layers"
    if directory.exists():
        return directory
    config = tiny_model.tiny_config()
    repeats = num_layers // len(config["layer_types"])
    config["num_hidden_layers"] = num_layers
    config["layer_types"] = config["layer_types"] * repeats
    config["mlp_only_layers"] = [i for i in range(num_layers) if i % 4 != 3]
    with pytest.MonkeyPatch.context() as only_here:
        only_here.setattr(tiny_model, "tiny_config", lambda: config)
        tiny_model.write_tiny_model(directory)
    return directory
