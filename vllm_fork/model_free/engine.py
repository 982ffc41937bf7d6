"""Drives a scheduler the way vLLM's engine core does, without processes."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_fork.model_free.event_recorder import EventRecorder
from vllm_fork.model_free.scheduler_factory import make_scheduler
from vllm_fork.model_free.worker import Acceptance, SimulatedWorker, accept_all

_DRAFT_TOKEN = 3


@dataclass
class FinishedRequest:
    """What a client was told of a request.

    ``cached_tokens``: prompt tokens served from the prefix cache, as
    ``usage.prompt_tokens_details.cached_tokens`` reports them; None if it never
    ran.
    """

    cached_tokens: int | None = None
    finish_reason: str | None = None
    num_output_tokens: int = 0


class ModelFreeEngine:
    """Follows ``EngineCore.step`` (``batch_queue_size`` 1) and
    ``step_with_batch_queue`` (2 and more: that many steps are in flight)."""

    def __init__(
        self, scheduler: Scheduler, worker: SimulatedWorker, batch_queue_size: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.batch_queue_size = batch_queue_size
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self.before_update: Callable[[], None] | None = None
        """Called when a step has run and its output is about to be processed."""
        self._aborts: list[str] = []
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._num_speculative_tokens = scheduler.num_spec_tokens

    def add(self, request: Request, completion: Sequence[int]) -> Request:
        """Queue ``request``; it will sample ``completion`` until it is stopped."""
        self.worker.expect(request, completion)
        self.requests[request.request_id] = request
        self.finished[request.request_id] = FinishedRequest()
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client goes away: takes effect when the next output is processed,
        with that step (and, with a batch queue, further ones) in flight."""
        self._aborts.append(request_id)

    def finish(self, request_id: str, status: RequestStatus) -> None:
        """End a request from outside the scheduler, between two steps."""
        if self.scheduler.finish_requests(request_id, status):
            reason = RequestStatus.get_finished_reason(status)
            self.finished[request_id].finish_reason = str(reason)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._aborts or self.scheduler.has_requests())

    def step(self) -> None:
        """One turn of the engine core's busy loop."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            executed = output.total_num_scheduled_tokens > 0
            self._queue.append((output, self.worker.execute(output)))
            if len(self._queue) < self.batch_queue_size and (
                executed or self.scheduler.has_requests()
            ):
                return
        elif not self._queue:
            self._process_aborts()
            return
        self._process(*self._queue.popleft())

    def run(self, max_steps: int = 200_000) -> None:
        """Step until nothing is left to do.

        Raises:
            RuntimeError: work is left after ``max_steps``.
        """
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise RuntimeError(f"no end after {max_steps} steps")

    @property
    def num_leaked_blocks(self) -> int:
        """Blocks that are not free; with no request left this must be 0."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    @property
    def events(self) -> EventRecorder:
        """What the scheduler told; it must be ``with_recorded_checkpoints``."""
        recorder = self.scheduler.publisher  # type: ignore[attr-defined]
        assert isinstance(recorder, EventRecorder)
        return recorder

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far, over all requests."""
        return sum(request.num_preemptions for request in self.requests.values())

    def _process_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            self.finish(request_id, RequestStatus.FINISHED_ABORTED)

    def _process(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if self.before_update is not None:
            self.before_update()
        self._process_aborts()
        by_client = self.scheduler.update_from_output(output, result)
        for outputs in by_client.values():
            for request_output in outputs.outputs:
                self._record(request_output)
        if self._num_speculative_tokens and self.batch_queue_size == 1:
            self._propose_drafts(result.req_ids)

    def _record(self, output: EngineCoreOutput) -> None:
        record = self.finished[output.request_id]
        record.num_output_tokens += len(output.new_token_ids)
        if output.prefill_stats is not None:
            record.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            record.finish_reason = str(output.finish_reason)

    def _propose_drafts(self, request_ids: Sequence[str]) -> None:
        running = [r for r in request_ids if r in self.scheduler.requests]
        drafts = [[_DRAFT_TOKEN] * self._num_speculative_tokens for _ in running]
        self.scheduler.update_draft_token_ids(DraftTokenIds(running, drafts))


def make_engine(
    cls: type[Scheduler],
    *,
    batch_queue_size: int | None = None,
    accept: Acceptance = accept_all,
    copied_slots: int | None = None,
    **scheduler_options: Any,
) -> ModelFreeEngine:
    """A scheduler, a worker and their engine.

    ``batch_queue_size``: None is vLLM's own choice, 1 without and 2 with
    ``async_scheduling``. ``scheduler_options``: see
    :func:`~vllm_fork.model_free.scheduler_factory.make_scheduler`.
    """
    scheduler = make_scheduler(cls, **scheduler_options)
    if batch_queue_size is None:
        batch_queue_size = 2 if scheduler_options.get("async_scheduling") else 1
    worker = SimulatedWorker(scheduler, accept=accept, copied_slots=copied_slots)
    return ModelFreeEngine(scheduler, worker, batch_queue_size)
