"""What the plugin does in the processes behind the front end."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.request import Request
from vllm.v1.worker import utils
from vllm.v1.worker.worker_base import WorkerBase

from vllm_fork import plugin
from vllm_fork.block_copy import HELPER
from vllm_fork.checkpoint import EXTERNAL_ID_ATTRIBUTE
from vllm_fork.config import RETAIN_ENV


@pytest.fixture
def stock_helper(monkeypatch):
    """vLLM's helper as a fresh process has it."""
    helper = getattr(utils, HELPER)
    helper = getattr(helper, "__wrapped__", helper)
    monkeypatch.setattr(utils, HELPER, helper)
    return helper


@pytest.mark.parametrize("retain", ["0", "1"])
def test_workers_copy_whole_pages_where_states_are_retained(
    hybrid_model, stock_helper, monkeypatch, retain
):
    config = EngineArgs(model=str(hybrid_model)).create_engine_config()
    assert getattr(utils, HELPER) is stock_helper
    plugin.register()
    monkeypatch.setenv(RETAIN_ENV, retain)
    WorkerBase(config, local_rank=0, rank=0, distributed_init_method="")
    assert (getattr(utils, HELPER) is not stock_helper) is (retain == "1")


def test_the_stream_ends_before_the_workers_are_waited_for(monkeypatch):
    """vLLM waits for them first, and is killed if that takes too long."""
    plugin.register()
    monkeypatch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
    order = Mock()
    engine = object.__new__(core.EngineCore)
    engine.structured_output_manager = order.structured_output
    engine.model_executor = order.workers
    engine.scheduler = order.scheduler
    engine.shutdown()
    calls = [name for name, _, _ in order.mock_calls]
    assert calls.index("scheduler.close_stream") < calls.index("workers.shutdown")
    assert calls.index("workers.shutdown") < calls.index("scheduler.shutdown")


def test_a_stock_scheduler_shuts_down_as_ever(monkeypatch):
    plugin.register()
    monkeypatch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
    engine = object.__new__(core.EngineCore)
    engine.structured_output_manager = Mock()
    engine.model_executor = None
    engine.scheduler = Mock(spec=Scheduler)
    engine.shutdown()
    engine.scheduler.shutdown.assert_called_once_with()


def test_the_client_s_id_reaches_the_core_s_request(monkeypatch):
    monkeypatch.setenv(RETAIN_ENV, "1")
    SchedulerConfig(max_model_len=2048, is_encoder_decoder=False).get_scheduler_cls()
    sent = EngineCoreRequest(
        request_id="cmpl-1-0123abcd",
        external_req_id="cmpl-1",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request = Request.from_engine_core_request(sent, None)
    assert getattr(request, EXTERNAL_ID_ATTRIBUTE) == "cmpl-1"
