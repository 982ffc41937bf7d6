"""What is watched for is told after the very step that brings it."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from vllm_fork.model_free import make_request
from vllm_fork.step_watch import StepWatch

IDS = "abcd"


def step(watch: StepWatch, num_scheduled: dict[str, int]) -> set[str]:
    """Who is told of after a step, as ``schedule`` asks for it."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = num_scheduled
    output.total_num_scheduled_tokens = sum(num_scheduled.values())
    watch.num_steps += 1
    if watch.num_steps not in watch.alarms and not watch.may_leap(output):
        return set()
    arrived = watch.arrived(output)
    assert len(arrived) == len({request.request_id for request in arrived})
    return {request.request_id for request in arrived}


@given(st.data(), st.integers(1, 3))
def test_each_request_is_told_of_when_it_arrives(data, decode_tokens):
    watch = StepWatch(SimpleNamespace(num_free_blocks=0), [], decode_tokens)
    requests = {i: make_request(i, [1] * 20) for i in IDS}
    for request in requests.values():
        request.status = RequestStatus.RUNNING
    boundaries: dict[str, int | None] = {}

    def await_tokens(request_id: str) -> None:
        ahead = data.draw(st.none() | st.integers(0, 30), label="tokens ahead")
        computed = requests[request_id].num_computed_tokens
        boundaries[request_id] = None if ahead is None else computed + ahead
        watch.await_tokens(requests[request_id], boundaries[request_id])

    num_tokens = st.integers(1, decode_tokens + 1) | st.integers(1, 40)
    a_step = st.dictionaries(st.sampled_from(IDS), num_tokens)
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        for request_id in IDS:
            action = data.draw(st.sampled_from(["", "", "", "watch", "forget", "back"]))
            if action == "watch":
                await_tokens(request_id)
            elif action == "forget":
                watch.forget(request_id)
                boundaries.pop(request_id, None)
            elif action == "back":  # rejected drafts, blocks that failed to load
                request = requests[request_id]
                request.num_computed_tokens = max(0, request.num_computed_tokens - 5)
        assert watch.missed() == []
        assert set(watch) == set(boundaries)
        num_scheduled = data.draw(a_step, label="step")
        for request_id, num_tokens in num_scheduled.items():
            requests[request_id].num_computed_tokens += num_tokens
        told = step(watch, num_scheduled)
        assert told == {
            i
            for i, boundary in boundaries.items()
            if boundary is not None and requests[i].num_computed_tokens >= boundary
        }
        for request_id in told:
            await_tokens(request_id)
    watch.stop()
    assert step(watch, dict.fromkeys(IDS, 50)) == set()


def test_a_decode_step_looks_at_nobody_before_their_time():
    watch = StepWatch(SimpleNamespace(num_free_blocks=0), [], decode_tokens=1)
    request = make_request("a", [1])
    watch.await_tokens(request, 3)
    for tokens in (1, 2):
        request.num_computed_tokens = tokens
        assert step(watch, {"a": 1}) == set()
        assert watch.alarms == {3: {"a": request}}
    request.num_computed_tokens = 3
    assert step(watch, {"a": 1}) == {"a"}


def test_a_request_that_nobody_would_be_told_of_is_missed():
    watch = StepWatch(SimpleNamespace(num_free_blocks=0), [], decode_tokens=1)
    request = make_request("a", [1])
    request.status = RequestStatus.RUNNING
    watch.await_tokens(request, 10)
    assert watch.missed() == []
    request.num_computed_tokens = 5  # past ``schedule``
    assert watch.missed() == ["a"]
