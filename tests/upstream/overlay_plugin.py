"""A pytest plugin for vLLM's own tests: every scheduler they build is ours.

``UPSTREAM_OVERLAY=on``: as an operator would have it. ``UPSTREAM_OVERLAY=everywhere``:
the controller is built wherever there are Mamba groups in align mode, also under
dense retention, where the front end refuses it: most upstream tests leave the
interval unset, and would otherwise never meet a controller.
"""

from __future__ import annotations

import os

import vllm.v1.core.sched.async_scheduler as async_scheduler
import vllm.v1.core.sched.scheduler as scheduler

from vllm_fork import scheduler as overlay
from vllm_fork.retention import mamba_align_managers

built = {"schedulers": 0, "controllers": 0}


def pytest_configure() -> None:
    overlay.CheckpointSchedulerMixin.strict = True
    if os.environ["UPSTREAM_OVERLAY"] == "everywhere":
        overlay.why_unsupported = _only_without_mamba  # type: ignore[attr-defined]
    attach = overlay.CheckpointSchedulerMixin._attach

    def counting_attach(self, settings):
        attach(self, settings)
        built["schedulers"] += 1
        built["controllers"] += self.retention is not None

    overlay.CheckpointSchedulerMixin._attach = counting_attach  # type: ignore[method-assign]
    # Before any test module imports them by name.
    with_async = overlay.with_checkpoints(async_scheduler.AsyncScheduler)
    async_scheduler.AsyncScheduler = with_async  # type: ignore[misc]
    with_sync = overlay.with_checkpoints(scheduler.Scheduler)
    scheduler.Scheduler = with_sync  # type: ignore[misc]


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(
        f"overlay: {built['schedulers']} schedulers, {built['controllers']} with a "
        "controller"
    )


def _only_without_mamba(kv_cache_manager) -> str | None:
    if kv_cache_manager.enable_caching and mamba_align_managers(kv_cache_manager):
        return None
    return "unsupported:no_align_mamba_groups"
