"""vLLM's real scheduler and KV-cache manager without a model.

:func:`make_scheduler` builds any vLLM scheduler class over a small hybrid
configuration; :class:`ModelFreeEngine` drives it as vLLM's ``EngineCore`` does;
:class:`SimulatedWorker` executes its steps and knows what every physical block
holds, so that a request that starts from a state or from pages that are not
exactly its own prefix is reported as a :class:`StateError`.

Importing this package imports vLLM and torch. No network, no weights, no GPU.
"""

from vllm_fork.model_free.block_references import (
    blocks_only_pins_hold,
    references_beyond_requests,
)
from vllm_fork.model_free.cache_audit import PrefixCacheAudit
from vllm_fork.model_free.engine import FinishedRequest, ModelFreeEngine, make_engine
from vllm_fork.model_free.event_recorder import (
    EventRecorder,
    with_recorded_checkpoints,
)
from vllm_fork.model_free.requests import STOP_TOKEN, make_request
from vllm_fork.model_free.scheduler_factory import make_scheduler
from vllm_fork.model_free.worker import SimulatedWorker, StateError

__all__ = [
    "STOP_TOKEN",
    "EventRecorder",
    "FinishedRequest",
    "ModelFreeEngine",
    "PrefixCacheAudit",
    "SimulatedWorker",
    "StateError",
    "blocks_only_pins_hold",
    "make_engine",
    "make_request",
    "make_scheduler",
    "references_beyond_requests",
    "with_recorded_checkpoints",
]
