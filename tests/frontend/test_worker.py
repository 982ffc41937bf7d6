"""Workers copy whole pages where states are retained, and only there."""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker import utils
from vllm.v1.worker.worker_base import WorkerBase

from vllm_fork import plugin
from vllm_fork.block_copy import HELPER
from vllm_fork.config import RETAIN_ENV


@pytest.fixture
def stock_helper(monkeypatch):
    """vLLM's helper as a fresh process has it."""
    helper = getattr(utils, HELPER)
    helper = getattr(helper, "__wrapped__", helper)
    monkeypatch.setattr(utils, HELPER, helper)
    return helper


@pytest.mark.parametrize("retain", ["0", "1"])
def test_worker(hybrid_model, stock_helper, monkeypatch, retain):
    config = EngineArgs(model=str(hybrid_model)).create_engine_config()
    assert getattr(utils, HELPER) is stock_helper
    plugin.register()
    monkeypatch.setenv(RETAIN_ENV, retain)
    WorkerBase(config, local_rank=0, rank=0, distributed_init_method="")
    assert (getattr(utils, HELPER) is not stock_helper) is (retain == "1")
