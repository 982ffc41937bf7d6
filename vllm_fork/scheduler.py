"""The scheduler mixin: where the overlay hooks into a vLLM scheduler.

``with_checkpoints(cls)`` derives from whatever scheduler class vLLM resolved, so
synchronous, asynchronous and custom schedulers all keep their own behaviour; each
hook calls vLLM's own method and adds a few lines around it. The hooks, in the order of
a request's life:

================================  =================================================
``get_computed_blocks``           finds exact tails; remembers what an admission found
``_mamba_block_aligned_split``    lets a short follow-up run in one step
``record_prefix_cache_stats``     the admission took place: ``PrefixReused``, and the
                                  request is watched from here on
``schedule``                      promotes the pins that were accepted since; arms the
                                  relief of pins if memory may run short; then pins
                                  what the step will complete, promotes rolling copies
                                  and adds those that the step has to make first
``_preempt_request``              discards (or publishes) before the blocks go
``_free_request``                 publishes before, releases after the blocks go
``reset_prefix_cache``            tells a forced reset from a preemption
================================  =================================================
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

import vllm_fork
from vllm_fork import events
from vllm_fork.block_copy import resolve_chains
from vllm_fork.cache_index import CachedState, CacheIndex
from vllm_fork.checkpoint import Checkpoint
from vllm_fork.config import Settings, load_settings
from vllm_fork.exact_tail import TailIndex
from vllm_fork.observer import Observer
from vllm_fork.publisher import CheckpointPublisher
from vllm_fork.retention import (
    IntegrityReport,
    RetentionController,
    mamba_align_managers,
    why_no_copies,
    why_no_exact_tail,
    why_unsupported,
)
from vllm_fork.short_follow_up import ShortFollowUps
from vllm_fork.step_watch import StepWatch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    _Base = Scheduler
else:
    _Base = object

logger = init_logger(__name__)

T = TypeVar("T")


class CheckpointSchedulerMixin(_Base):
    """Retention and its events on top of a vLLM scheduler.

    ``retention`` is None where no checkpoint is retained; ``observer`` is always
    there. ``strict``: let an error inside a hook escape (tests); otherwise it is
    logged once, retention is given up, and the engine goes on as stock vLLM.
    """

    strict = False

    # Bound by ``with_checkpoints``.
    _stock_schedule: Callable[[bool], SchedulerOutput]
    # Set by ``_attach``.
    _watch: StepWatch

    # Until ``_attach`` has run, and in a scheduler that never ran ``__init__``.
    observer = Observer(None, "disabled")
    publisher: CheckpointPublisher | None = None
    cache_index: CacheIndex | None = None
    retention: RetentionController | None = None
    tails: TailIndex | None = None
    _follow_ups: ShortFollowUps | None = None
    _stream_closed = False
    _resetting = False
    _relief_armed = False
    _repairs_copies = False
    _failed_at: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = load_settings(os.environ, self.vllm_config.additional_config)
        self._attach(settings)

    def _attach(self, settings: Settings) -> None:
        manager = self.kv_cache_manager
        reason = why_unsupported(manager) if settings.retain else "disabled"
        self.engine_id = str(uuid.uuid4())
        self.publisher = self._make_publisher(settings)
        self.observer = Observer(
            self.publisher.publish if self.publisher else None,
            reason,
            settings.events.hash_session_ids,
        )
        self._watch = StepWatch(
            manager.block_pool.free_block_queue,
            self.observer.collected,
            1 + self.num_spec_tokens,
        )
        mamba = mamba_align_managers(manager)
        self.cache_index = CacheIndex(
            manager.block_pool,
            [m.kv_cache_group_id for m in mamba],
            self._note_evicted,
            functools.partial(self._run, "an eviction"),
        )
        exact_tail: str | None = "off"
        if reason is None:
            exact_tail = self._why_no_exact_tail(settings)
            if exact_tail is None:
                groups = manager.coordinator.single_type_managers
                attention = [
                    m
                    for m in groups
                    if m.kv_cache_spec.prefix_cacheable and m not in mamba
                ]
                self.tails = TailIndex(
                    manager.block_pool, mamba, attention, len(groups)
                )
                self._follow_ups = self._short_follow_ups(settings)
            self.retention = RetentionController(
                manager,
                settings.publish_on,
                self.num_spec_tokens,
                self.max_num_scheduled_tokens,
                self.observer,
                self.cache_index,
                self._watch,
                self.tails,
                self._copy_interval(settings),
            )
            for request in self.running:
                self.retention.watch(request)
            self._repairs_copies = True
            self._watch.ample_blocks = self.retention.ample_blocks(
                self.max_num_running_reqs
            )
            if self.mamba_has_prefill_checkpoint_blocks:
                self._end_chunks_with_blocks()
        self._found: tuple[str, CachedState | None] = ("", None)
        self._stock_allocate_slots = manager.allocate_slots
        self._follow_lookups()
        self._follow_admissions()
        self._announce(settings, reason, exact_tail, len(mamba))

    def _why_no_exact_tail(self, settings: Settings) -> str | None:
        if not settings.exact_tail:
            return "off"
        return why_no_exact_tail(
            self.kv_cache_manager, self.num_spec_tokens, self.connector is not None
        )

    def _short_follow_ups(self, settings: Settings) -> ShortFollowUps | None:
        if not settings.one_step_tokens or not self.mamba_partial_cache_hit:
            return None
        if self.mamba_has_prefill_checkpoint_blocks:
            # Such a backend exports the state that others end a step for.
            return None
        return ShortFollowUps(
            settings.one_step_tokens, self.hash_block_size, self.block_size
        )

    def _make_publisher(self, settings: Settings) -> CheckpointPublisher | None:
        if not settings.events.enabled:
            return None
        config = self.vllm_config
        return CheckpointPublisher(
            settings.events,
            engine_id=self.engine_id,
            data_parallel_rank=config.parallel_config.data_parallel_index,
            model_name=_model_name(config),
        )

    def _copy_interval(self, settings: Settings) -> int:
        if not settings.copy_interval:
            return 0
        reason = why_no_copies(
            self.kv_cache_manager,
            self.num_spec_tokens,
            self.connector is not None,
            settings.copy_interval,
        )
        if reason is None:
            return settings.copy_interval
        logger.warning("No rolling copy is made here: %s.", reason)
        return 0

    def _announce(
        self, settings: Settings, reason: str | None, no_tail: str | None, groups: int
    ) -> None:
        import vllm

        manager = self.kv_cache_manager
        copies = self.retention.copies if self.retention else None
        self.observer.emit(
            events.EngineStarted,
            vllm_version=vllm.__version__,
            fork_version=vllm_fork.__version__,
            retention="on" if reason is None else "off",
            retention_reason=reason,
            exact_tail=no_tail or "on",
            copy_interval=copies.interval if copies else 0,
            publish_on=sorted(settings.publish_on),
            block_size=manager.coordinator.scheduler_block_size,
            hash_unit=manager.block_pool.hash_block_size,
            num_blocks=manager.block_pool.num_gpu_blocks,
            num_mamba_groups=groups,
            async_scheduling=bool(self.scheduler_config.async_scheduling),
        )
        self.observer.flush()
        if settings.retain:
            if reason is None:
                logger.info(
                    "Decode checkpoints are retained: %d Mamba group(s), block of %d "
                    "tokens, published on %s.",
                    groups,
                    manager.coordinator.scheduler_block_size,
                    ", ".join(sorted(settings.publish_on)) or "nothing",
                )
            else:
                logger.warning("No decode checkpoint is retained here: %s.", reason)

    # -- admission -----------------------------------------------------------------

    def _follow_lookups(self) -> None:
        """Deepen what ``get_computed_blocks`` finds, and remember it."""
        manager = self.kv_cache_manager
        stock = manager.get_computed_blocks

        def get_computed_blocks(request: Request) -> tuple[KVCacheBlocks, int, int]:
            hit = stock(request)
            return self._run("a look-up", self._look_deeper, request, hit) or hit

        manager.get_computed_blocks = get_computed_blocks  # type: ignore[method-assign]

    def _look_deeper(
        self, request: Request, hit: tuple[KVCacheBlocks, int, int]
    ) -> tuple[KVCacheBlocks, int, int]:
        is_enabled = self.kv_cache_manager.prefix_cache_lookup_enabled(request)
        if self.tails is not None and is_enabled:
            hit = self._deepen(request, *hit)
        state = self._state_at(hit[0])
        self._found = (request.request_id, state)
        if state is not None and state.checkpoint is not None and self._follow_ups:
            _, num_cached, junction = hit
            if self._follow_ups.includes(request, num_cached, junction):
                self._run_in_one_step(request)
        return hit

    def _state_at(self, hit: KVCacheBlocks) -> CachedState | None:
        """The cached state that a hit resumes from."""
        assert self.cache_index is not None
        for group in self.cache_index.mamba_group_ids:
            if hit.blocks[group]:
                return self.cache_index.state_of(hit.blocks[group][-1])
        return None

    def _deepen(
        self,
        request: Request,
        blocks: KVCacheBlocks,
        num_tokens: int,
        shared_prefix_boundary: int,
    ) -> tuple[KVCacheBlocks, int, int]:
        """Prefer an exact tail that lies deeper than what vLLM found."""
        assert self.tails is not None
        tail = self.tails.find(request, num_tokens)
        if tail is None:
            return blocks, num_tokens, shared_prefix_boundary
        if shared_prefix_boundary <= tail.num_tokens:
            shared_prefix_boundary = 0
        return (
            self.kv_cache_manager.create_kv_cache_blocks(tail.blocks),
            tail.num_tokens,
            shared_prefix_boundary,
        )

    def _run_in_one_step(self, request: Request) -> None:
        """Let no step of ``request`` end inside its prompt: see ``short_follow_up``.

        vLLM asks how far the prefill goes right after it looked the prompt up. It asks
        that for every running request in every step as well, so that its own method is
        replaced for the next call only. No call may follow (prefills are throttled);
        then another look-up does before the request is admitted, and it counts.
        """
        split = type(self)._mamba_block_aligned_split
        found = self._found

        def mamba_block_aligned_split(
            asked: Request, num_new_tokens: int, *computed: int
        ) -> int:
            del self._mamba_block_aligned_split
            end = asked.num_computed_tokens + sum(computed) + num_new_tokens
            is_meant = asked is request and self._found is found
            if is_meant and end == request.num_prompt_tokens:
                return num_new_tokens
            return split(self, asked, num_new_tokens, *computed)

        setattr(self, split.__name__, mamba_block_aligned_split)

    def _end_chunks_with_blocks(self) -> None:
        """Let no chunk of a prefill run from inside a block over that block's end.

        vLLM 0.32.0 lets it where the backend exports prefill states (Mamba2, KDA):
        the block's end, if it is cached then, gets the state that the chunk began from.
        Seen at a shared-prefix junction, with a positive retention interval, and with
        neither in a pool that preempts.
        """
        split = self._mamba_block_aligned_split

        def mamba_block_aligned_split(
            request: Request, num_new_tokens: int, *computed: int
        ) -> int:
            num_new_tokens = split(request, num_new_tokens, *computed)
            start = request.num_computed_tokens + sum(computed)
            is_decode = start >= max(request.num_prompt_tokens, request.num_tokens - 1)
            to_end = self.block_size - start % self.block_size
            if is_decode or to_end == self.block_size:
                return num_new_tokens
            return min(num_new_tokens, to_end)

        setattr(self, split.__name__, mamba_block_aligned_split)

    def _follow_admissions(self) -> None:
        """Follow ``record_prefix_cache_stats``: called once an admission.

        With a KV connector the request may have to wait for its blocks still.
        """
        manager = self.kv_cache_manager
        record = manager.record_prefix_cache_stats

        def record_prefix_cache_stats(request: Request, num_hits: int) -> None:
            record(request, num_hits)
            if self.retention is not None:
                self._run("an admission", self.retention.watch, request)
            if self.observer.enabled:
                self._run("an admission", self._note_admitted, request, num_hits)

        manager.record_prefix_cache_stats = record_prefix_cache_stats  # type: ignore[method-assign]

    def _note_admitted(self, request: Request, num_hits: int) -> None:
        found_for, state = self._found
        if found_for != request.request_id or not num_hits:
            state = None
        if state is not None and state.checkpoint is not None:
            state.checkpoint.num_hits += 1
        if num_hits and state is None:
            state = CachedState(events.SHARED_PREFIX, None, None)
        stats = request.prefill_stats
        external = stats.num_external_cached_tokens if stats else 0
        self.observer.admitted(
            request,
            num_hits,
            external,
            self._hit_limited_by(request, num_hits, external),
            state,
        )
        self._expect_stock_states(request)

    def _hit_limited_by(self, request: Request, num_hits: int, external: int) -> str:
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return "skipped"
        if external:
            return "connector"
        managers = manager.coordinator.single_type_managers
        unit = managers[0].cache_hit_alignment_tokens
        if num_hits >= (request.num_tokens - 1) // unit * unit:
            return "prompt_end"
        if request.shared_prefix_boundary > num_hits:
            return "recurrent_state"
        return "attention"

    def _expect_stock_states(self, request: Request) -> None:
        """Tell the index which states stock vLLM may cache for this prompt."""
        index = self.cache_index
        if index is None or not index.mamba_group_ids:
            return
        hashes = request.block_hashes
        unit = self.kv_cache_manager.block_pool.hash_block_size
        block = self.kv_cache_manager.coordinator.scheduler_block_size
        identity = self.observer.identity(request)
        shared = request.shared_prefix_boundary
        for kind, tokens in (
            (events.SHARED_PREFIX, shared // unit * unit),
            (events.SHARED_PREFIX, shared // block * block),
            (events.PROMPT_REPLAY, (request.num_prompt_tokens - 1) // unit * unit),
            (events.PROMPT_REPLAY, (request.num_prompt_tokens - 1) // block * block),
        ):
            if 0 < tokens <= len(hashes) * unit:
                index.expect(identity, kind, hashes[tokens // unit - 1], tokens)

    # -- a step --------------------------------------------------------------------

    # The one hook that runs in every step; see ``step_watch``. So it is written out,
    # not passed to ``_run``, and calls what ``with_checkpoints`` bound: ``super()``
    # looks it up anew each time.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        watch = self._watch
        if watch.is_due or watch.free_blocks.num_free_blocks < watch.ample_blocks:
            try:
                self._prepare_step()
            except Exception:
                self._fail("a step")
        output = self._stock_schedule(throttle_prefills)
        if output.kv_cache_block_copies is not None and self._repairs_copies:
            # See ``block_copy``.
            output.kv_cache_block_copies = resolve_chains(output.kv_cache_block_copies)
        watch.num_steps = now = watch.num_steps + 1
        try:
            # The second half is ``StepWatch.may_leap``, written out.
            if now in watch.alarms or (
                output.total_num_scheduled_tokens - len(output.num_scheduled_tokens)
                >= watch.decode_tokens
            ):
                self._reach(output)
            # Last: should an eviction that a copy causes fail, all was given up.
            if now in watch.turns:
                self._copy(output)
        except Exception:
            self._fail("a scheduled step")
        if watch.events:
            self.observer.flush()
        return output

    def _prepare_step(self) -> None:
        retention, watch = self.retention, self._watch
        if retention is None:
            return
        retention.accept_outputs(self.requests)
        if self._relief_armed or watch.free_blocks.num_free_blocks < watch.ample_blocks:
            self._arm_relief(retention.may_run_short(len(self.running)))
            watch.is_due = watch.is_due or self._relief_armed

    def _reach(self, output: SchedulerOutput) -> None:
        if self.retention is not None:
            for request in self._watch.arrived(output):
                self.retention.reach(request)

    def _copy(self, output: SchedulerOutput) -> None:
        if self.retention is None or (rolling := self.retention.copies) is None:
            return
        copies = rolling.take_turns()
        if copies:
            others = output.kv_cache_block_copies
            if others or rolling.took_spare:
                copies = resolve_chains([*(others or ()), *copies])
            output.kv_cache_block_copies = copies

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> Any:
        affected = super()._handle_invalid_blocks(*args, **kwargs)
        if self.retention is not None:
            self._run(
                "blocks that failed to load",
                self.retention.drop_rewound,
                self.requests,
            )
            self.observer.flush()
        return affected

    # -- memory pressure -------------------------------------------------------------

    def _arm_relief(self, armed: bool) -> None:
        """Let pins be given back before a RUNNING request preempts anyone.

        Stock vLLM's ``allocate_slots`` is replaced only for steps in which an
        allocation can fail at all.
        """
        self._relief_armed = armed
        manager = self.kv_cache_manager
        manager.allocate_slots = (  # type: ignore[method-assign]
            self._allocate_slots_or_relieve if armed else self._stock_allocate_slots
        )

    def _allocate_slots_or_relieve(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        allocate = self._stock_allocate_slots
        blocks = allocate(request, *args, **kwargs)
        while (
            blocks is None
            and request.status == RequestStatus.RUNNING
            and self.retention is not None
            and self._run("memory pressure", self.retention.relieve)
        ):
            blocks = allocate(request, *args, **kwargs)
        return blocks

    # -- the end ---------------------------------------------------------------------

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self.retention is not None:
            reason = "cache_reset" if self._resetting else "preempted"
            self._run("a preemption", self.retention.preempt, request, reason)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self.retention is not None:
            self._run("a finished request", self.retention.finish, request)
        freed = super()._free_request(request, *args, **kwargs)
        if self.retention is not None:
            self._run("a freed request", self.retention.release, request)
        self._run("a finished request's event", self.observer.finished, request)
        # No step may follow an abort.
        self.observer.flush()
        return freed

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._resetting = True
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._resetting = False
            self.observer.flush()

    def shutdown(self) -> None:
        self.close_stream()
        super().shutdown()

    def close_stream(self) -> None:
        """Tell that the engine stops. The plugin asks for it early: vLLM ends the
        workers before the scheduler, and may be killed over it."""
        if self._stream_closed:
            return
        self._stream_closed = True
        try:
            if self.retention is not None:
                self.retention.abandon("shutdown")
            self._end_open_requests()
            self.observer.emit(events.EngineStopped)
            self.observer.flush()
            if self.publisher is not None:
                self.publisher.shutdown()
        except Exception:
            logger.exception("The checkpoint stream did not shut down in order.")

    def _end_open_requests(self) -> None:
        """Those that an engine in trouble takes with it: vLLM ends none of them."""
        for request in self.requests.values():
            if not request.is_finished():
                self.observer.finished(request, str(FinishReason.ERROR))

    def check_integrity(self) -> IntegrityReport | None:
        """Count every block's holders; None where nothing is retained.

        Raises:
            IntegrityError: see ``RetentionController.check_integrity``.
        """
        if self.retention is None:
            return None
        return self.retention.check_integrity(self)

    def _note_evicted(self, checkpoint: Checkpoint, reason: str) -> None:
        if self.tails is not None:
            self.tails.discard(checkpoint)
        self.observer.evicted(checkpoint, reason)

    def _run(self, where: str, hook: Callable[..., T], *args: Any) -> T | None:
        """Run a hook of ours: its error must not stop the engine."""
        try:
            return hook(*args)
        except Exception:
            self._fail(where)
            return None

    def _fail(self, where: str) -> None:
        """Go on as stock vLLM; call while handling the error of a hook."""
        if self.strict:
            raise
        if where not in self._failed_at:
            self._failed_at |= {where}
            logger.exception(
                "Checkpoint retention failed at %s and is off from here on; the engine "
                "goes on without it.",
                where,
            )
        retention, self.retention = self.retention, None
        self._watch.stop()
        self.tails = None
        self._follow_ups = None
        self._arm_relief(False)
        self.observer.retention_off_reason = "unsupported:internal_error"
        if retention is not None:
            try:
                retention.abandon("error")
            except Exception:
                logger.exception("Some checkpoints could not be released.")


@functools.cache
def with_checkpoints(scheduler_cls: type) -> type:
    """A subclass of ``scheduler_cls`` with retention and events.

    A class that does not derive from vLLM's ``Scheduler`` has none of the seams and
    is returned as it is, with a warning.
    """
    if not (isinstance(scheduler_cls, type) and issubclass(scheduler_cls, Scheduler)):
        logger.warning(
            "The scheduler class %s does not derive from vLLM's Scheduler: no "
            "checkpoint is retained and no event is sent.",
            scheduler_cls,
        )
        return scheduler_cls
    if issubclass(scheduler_cls, CheckpointSchedulerMixin):
        return scheduler_cls
    return type(
        f"Checkpoint{scheduler_cls.__name__}",
        (CheckpointSchedulerMixin, scheduler_cls),
        {
            "__module__": scheduler_cls.__module__,
            "_stock_schedule": scheduler_cls.schedule,
        },
    )


def _model_name(vllm_config: Any) -> str:
    model_config = vllm_config.model_config
    served = getattr(model_config, "served_model_name", None)
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or model_config.model)
