"""The demo's parts: its checks can fail, and what goes wrong is one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from event_consumer import names
from event_consumer.otlp_receiver import ReceivedLink, ReceivedSpan
from event_consumer.store import Store
from vllm_fork.demo import checks, services
from vllm_fork.demo.__main__ import Demo, Ended, _stay_up, app
from vllm_fork.demo.dialog import TurnResult
from vllm_fork.demo.processes import DemoError, Service, require_free
from vllm_fork.demo.table import ab_table

OFF = [
    TurnResult("off-0", prompt=61, completion=3613, cached=0, text=""),
    TurnResult("off-1", prompt=3729, completion=4374, cached=48, text=""),
]
ON = [
    TurnResult("on-0", prompt=61, completion=3518, cached=0, text=""),
    TurnResult("on-1", prompt=3634, completion=4080, cached=3168, text=""),
]


def span(name, span_id, *, parent="", links=(), **attributes):
    return ReceivedSpan(
        name=name,
        trace_id="1" * 32,
        span_id=span_id,
        parent_span_id=parent,
        trace_state="",
        flags=1,
        kind=1,
        start_ns=0,
        end_ns=1,
        attributes=attributes,
        events=[],
        links=[ReceivedLink("1" * 32, target, {}) for target in links],
        status=0,
        status_message="",
        resource={},
        scope="",
    )


def test_table_has_the_reference_s_shape():
    assert ab_table(OFF, ON).splitlines() == [
        "Turn      Retain=0 (cached / prompt / completion)  "
        "Retain=1 (cached / prompt / completion)",
        f"--------  {'-' * 39}  {'-' * 39}",
        f"0         {'0 / 61 / 3613':39}  0 / 61 / 3518",
        f"1         {'48 / 3729 / 4374':39}  3168 / 3634 / 4080",
        f"Total     {'48 / 3790 / 7987':39}  3168 / 3695 / 7598",
        f"Hit rate  {'1.3%':39}  85.7%",
    ]


def test_more_must_be_reused():
    assert not checks.more_is_reused(OFF, ON).problem
    assert checks.more_is_reused(ON, OFF).problem
    assert checks.more_is_reused(ON, ON).problem


@pytest.mark.parametrize(
    ("told", "holds"),
    [
        ({"on-0": 0, "on-1": 3168}, True),
        ({"on-0": 0, "on-1": 3167}, False),
        ({"on-1": 3168}, False),
    ],
)
def test_every_turn_must_be_told_as_the_client_saw_it(told, holds):
    assert bool(checks.same_reuse("on", ON, "in the store", told).problem) != holds


@pytest.mark.parametrize(
    ("links", "parent", "stage", "holds"),
    [
        (["c" * 16], "a" * 16, "published", True),
        ([], "a" * 16, "published", False),
        (["c" * 16], "a" * 16, "discarded", False),
        (["c" * 16], "f" * 16, "published", False),
    ],
)
def test_turns_must_be_linked(links, parent, stage, holds):
    """To a span that published, under the request span of the turn before."""
    spans = {
        "on-0": span(names.REQUEST_SPAN, "a" * 16),
        "on-1": span(names.REQUEST_SPAN, "b" * 16, links=links),
    }
    checkpoint = span(
        names.CHECKPOINT_SPAN, "c" * 16, parent=parent, **{names.STAGE: stage}
    )
    found = checks.turns_are_linked(ON, {}, spans, [checkpoint])
    assert bool(found.problem) != holds


@pytest.mark.parametrize(
    ("stages", "holds"),
    [
        ([names.PINNED, names.PROMOTED, names.PUBLISHED], True),
        ([names.PINNED, names.DISCARDED], True),
        ([names.PINNED, names.PROMOTED], False),
        ([names.PINNED, names.PUBLISHED, names.DISCARDED], False),
        ([names.PINNED, names.PINNED, names.PUBLISHED], False),
        ([names.PUBLISHED], False),
    ],
)
def test_lives_must_be_whole(stages, holds):
    assert bool(checks.lives_are_whole({("trace", 1): stages}).problem) != holds


def test_no_checkpoint_at_all_is_no_success():
    assert checks.lives_are_whole({}).problem


def test_reason_must_be_given():
    given = {turn.request_id: {"no_checkpoint_reason": "disabled"} for turn in OFF}
    assert not checks.reason_is_given(OFF, given).problem
    assert checks.reason_is_given(OFF, {}).problem


def test_taken_port_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DemoError, match=f"^port {port} for the dashboard cannot"):
            require_free({"the dashboard": port})


def test_demo_ends_with_that_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        demo = subprocess.run(
            [
                *(sys.executable, "-m", "vllm_fork.demo", "--once"),
                *("--port", str(port), "--directory", str(tmp_path / "demo")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert demo.returncode == 1
    assert demo.stderr.startswith(f"demo: port {port} for the dashboard cannot be used")
    assert "Traceback" not in demo.stderr
    assert not (tmp_path / "demo").exists()


def run_demo(directory, *more):
    """Up to what keeps it from starting anything."""
    command = [sys.executable, "-m", "vllm_fork.demo", "--directory", str(directory)]
    return subprocess.run(
        [*command, "--port", "18100", *more],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("place", ["file", "file/below", "precious"])
def test_a_folder_that_is_not_the_demo_s_is_left_alone(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("mine")
    demo = run_demo(tmp_path / place)
    assert demo.returncode == 1
    (sentence, _) = (demo.stderr + demo.stdout).splitlines()
    assert sentence.startswith(f"demo: {tmp_path / place} ")
    assert sentence.endswith(" with --directory.")
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "precious" / "data").read_text() == "mine"


def test_an_earlier_demo_s_folder_is_emptied(tmp_path):
    directory = tmp_path / "demo"
    directory.mkdir()
    demo = Demo(directory, 18100, None)
    (directory / "tiny-model.log").touch()
    (directory / "checkpoints.db").touch()
    demo._empty_directory()
    assert list(directory.iterdir()) == []
    demo._empty_directory()


def test_a_running_demo_s_folder_is_left_alone(tmp_path, monkeypatch):
    """A second one says who has it and where else it may go, on whatever port."""

    def go_on(*_):
        raise AssertionError("the second demo went on")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(services, "write_model", go_on)
    directory = Path("demo")
    first = Demo(directory, 18200, None)
    first._hold_directory()
    first._empty_directory()
    for name in ("tiny-model.log", "checkpoints.db"):
        (directory / name).write_text("in use")
    with pytest.raises(DemoError) as refused:
        Demo(directory, 18100, None).start()
    sentence = str(refused.value)
    assert sentence.startswith(f"another demo (pid {os.getpid()} on ")
    assert " still runs in demo: end it, or name another folder" in sentence
    assert "--directory" in sentence
    assert (directory / "checkpoints.db").read_text() == "in use"
    first._running.close()
    assert not (directory / "demo.lock").exists()


def test_a_killed_demo_s_consumer_keeps_its_folder(tmp_path):
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "tiny-model.log").touch()
    demo = Demo(directory, 18100, None)
    with (
        Store(demo.store),
        contextlib.closing(demo._running),
        pytest.raises(DemoError, match=r"its consumer, pid \d+ on "),
    ):
        demo._hold_directory()
    assert (directory / "checkpoints.db").exists()
    demo._hold_directory()
    demo._running.close()


def test_a_demo_that_could_not_begin_leaves_its_folder_to_the_next(tmp_path):
    """It was killed before the first log."""
    (tmp_path / "demo.lock").touch()
    demo = Demo(tmp_path, 18100, None)
    with contextlib.closing(demo._running):
        demo._hold_directory()
    assert list(tmp_path.iterdir()) == []


def test_addresses_of_a_demo_that_stays_up(tmp_path, monkeypatch, capsys):
    """Ctrl-C comes as soon as they are printed."""

    def interrupt(_):
        raise Ended(signal.SIGINT)

    monkeypatch.setattr(time, "sleep", interrupt)
    _stay_up(Demo(tmp_path, 18100, "http://collector:4317"))
    printed = capsys.readouterr().out
    for address in (
        "http://127.0.0.1:18100\n",
        "http://127.0.0.1:18101/healthz\n",
        "http://127.0.0.1:18101/metrics\n",
        "http://127.0.0.1:18102/v1  (model tiny-hybrid)\n",
        "http://127.0.0.1:18102/metrics\n",
        "http://127.0.0.1:18105/v1 ",
        "tcp://127.0.0.1:18106  (replay tcp://127.0.0.1:18107)\n",
        "http://collector:4317\n",
        f"sqlite:///{tmp_path}/checkpoints.db\n",
    ):
        assert f"  {address}" in printed


@pytest.mark.parametrize("port", ["0", "-1", "65529", "abc"])
def test_first_port_that_is_none(tmp_path, port):
    demo = CliRunner().invoke(app, ["--port", port, "--directory", str(tmp_path / "d")])
    assert demo.exit_code == 2
    assert "Invalid value for '--port'" in demo.stderr
    assert not (tmp_path / "d").exists()


SLOW_TO_END = "trap 'sleep 1; exit' TERM; while :; do sleep 0.1; done"
STARTING = f"""
import os, sys, time
from vllm_fork.demo import __main__ as demo

def start(self):
    self.directory.mkdir()
    command = ["sh", "-c", {SLOW_TO_END!r}]
    service = demo.Service("slow", command, self._log("slow"), os.environ)
    self._keep(service)
    print(service._process.pid, flush=True)
    time.sleep(600)

demo.Demo.start = start
demo.app()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name
)
def test_nothing_outlives_an_interrupted_demo(tmp_path, number):
    """Not after a second Ctrl-C, and not when the terminal is gone as well."""
    demo = subprocess.Popen(
        [sys.executable, "-c", STARTING, "--directory", str(tmp_path / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    service = psutil.Process(int(demo.stdout.readline()))
    if number == signal.SIGHUP:
        demo.stdout.close()
    demo.send_signal(number)
    if number != signal.SIGHUP:
        assert "ending what was started" in demo.stdout.readline()
        demo.send_signal(number)
    assert demo.stderr.read() == ""
    assert demo.wait(30) == 128 + number
    assert not service.is_running()


def test_service_that_dies_says_its_last_words(tmp_path):
    command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
    service = Service("it", command, tmp_path / "log", os.environ)
    try:
        with pytest.raises(DemoError, match=r"it ended with exit code 3 .*: no luck"):
            service.wait_ready(lambda: False, timeout_s=20)
    finally:
        service.stop()


def test_service_is_ended_with_its_children(tmp_path):
    """The child is not told: it is ended with the group."""
    script = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(sleep).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    service = Service(
        "it", [sys.executable, "-c", script], tmp_path / "log", os.environ
    )
    service.wait_ready(lambda: service.last_line().isdigit(), timeout_s=20)
    child = psutil.Process(int(service.last_line()))
    service.stop()
    assert service.exit_code is not None

    def ended():
        try:
            return child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    deadline = time.monotonic() + 10
    while not ended():
        assert time.monotonic() < deadline


def test_missing_command_is_one_sentence(tmp_path):
    with pytest.raises(DemoError, match="it cannot start: no-such is not installed"):
        Service("it", ["no-such"], tmp_path / "log", os.environ)


@pytest.mark.parametrize("length", [0, -1, "ten", 2.5, True])
def test_stop_at_refuses_what_is_no_length(length):
    from vllm import SamplingParams

    from vllm_fork.demo.stop_at import StopAt

    with pytest.raises(ValueError, match="expected the number of output tokens"):
        StopAt.validate_params(SamplingParams(extra_args={"stop_at": length}))
