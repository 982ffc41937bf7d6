"""``python -m vllm_fork.demo``: play the dialog, check what it left behind, stay up."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer

from event_consumer import names
from event_consumer.consumer_lock import FileLock, HeldError, holder, lock_path
from event_consumer.otlp_receiver import OtlpReceiver
from vllm_fork.demo import checks, evidence, services
from vllm_fork.demo.checks import Check
from vllm_fork.demo.dialog import DIALOG, TurnResult, play, reset_prefix_cache
from vllm_fork.demo.processes import HOST, DemoError, Service, answers, require_free
from vllm_fork.demo.services import Arm
from vllm_fork.demo.table import ab_table

SETTLE_S = 30.0
"""How long the consumer may take to have told everything."""
FIRST_LOG: Final = "tiny-model"
"""Its file is the first that a demo writes: a folder that has it is a demo's."""
STORE_FILE: Final = "checkpoints.db"
HELD: Final = "demo"
LOCK_FILE: Final = lock_path(Path(HELD)).name
ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Ended(KeyboardInterrupt):
    """Ctrl-C, a signal, or a terminal that was closed."""

    def __init__(self, number: int) -> None:
        self.number = number


class Demo:
    """The running demo: its services, and what they are told about."""

    def __init__(self, directory: Path, first_port: int, otlp: str | None) -> None:
        self.directory = directory
        self.dashboard_port = first_port
        self.consumer_port = first_port + 1
        self.off = Arm("off", False, first_port + 2)
        self.on = Arm("on", True, first_port + 5)
        self.store = f"sqlite:///{directory.resolve() / STORE_FILE}"
        self.otlp = otlp
        self.receiver: OtlpReceiver | None = None
        self.started = time.monotonic()
        self._running = contextlib.ExitStack()

    @property
    def arms(self) -> list[Arm]:
        return [self.off, self.on]

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def start(self) -> None:
        """Start everything; the engines one after the other (each fills a core)."""
        require_free(
            {
                "the dashboard": self.dashboard_port,
                "the event consumer": self.consumer_port,
                **self.off.ports(),
                **self.on.ports(),
            }
        )
        self._hold_directory()
        self._empty_directory()
        model = self.directory / "model"
        self.say("writing the tiny hybrid model")
        services.write_model(model, self._log(FIRST_LOG))

        if self.otlp is None:
            self.receiver = self._running.enter_context(OtlpReceiver())
            self.otlp = self.receiver.grpc_url
        consumer = self._keep(
            services.start_consumer(
                self.arms,
                self.store,
                self.consumer_port,
                self.otlp,
                self._log("consumer"),
            )
        )
        dashboard = self._keep(
            services.start_dashboard(
                self.store, self.dashboard_port, self._log("dashboard")
            )
        )
        consumer.wait_ready(
            lambda: answers(f"{self.consumer_url}/metrics"),
            services.SERVICE_START_S,
        )
        dashboard.wait_ready(
            lambda: answers(f"{self.dashboard_url}/_stcore/health"),
            services.SERVICE_START_S,
        )
        for arm in self.arms:
            self.say(f"starting the engine with retention {arm.label}")
            engine = self._keep(
                services.start_engine(arm, model, self._log(f"engine-{arm.label}"))
            )
            engine.wait_ready(
                partial(services.engine_ready, arm), services.ENGINE_START_S
            )

    def _hold_directory(self) -> None:
        """Make the folder, and keep other demos from it until this one has ended.

        Raises:
            DemoError: it is another demo's that still runs, it holds other things
                than an earlier demo, or it cannot be made.
        """
        try:
            if not self._is_ours_to_empty():
                raise DemoError(
                    f"{self.directory} holds other things than an earlier demo: name "
                    "a new folder with --directory."
                )
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.directory / HELD)
            lock.acquire(patience_s=0)
            self._running.callback(lock.release)
            # One that was killed may have left its consumer behind.
            if who := holder(self.directory / STORE_FILE):
                raise HeldError(f"its consumer, {who}")
        except HeldError as error:
            raise DemoError(
                f"another demo ({error}) still runs in {self.directory}: end it, or "
                "name another folder with `python -m vllm_fork.demo --directory`."
            ) from None
        except OSError as error:
            raise DemoError(
                f"{self.directory} cannot be made ({error.strerror}): name another "
                "folder with --directory."
            ) from None

    def _is_ours_to_empty(self) -> bool:
        if not self.directory.exists() or self._log(FIRST_LOG).exists():
            return True
        return all(path.name == LOCK_FILE for path in self.directory.iterdir())

    def _empty_directory(self) -> None:
        """Remove what an earlier demo left in the folder."""
        for path in self.directory.iterdir():
            if path.name == LOCK_FILE:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @property
    def dashboard_url(self) -> str:
        return f"http://{HOST}:{self.dashboard_port}"

    @property
    def consumer_url(self) -> str:
        return f"http://{HOST}:{self.consumer_port}"

    def addresses(self) -> dict[str, str]:
        """Where each thing can be looked at while it runs."""
        found = {
            "Dashboard": self.dashboard_url,
            "Consumer, status": f"{self.consumer_url}/healthz",
            "Consumer, Prometheus": f"{self.consumer_url}/metrics",
        }
        for arm in self.arms:
            engine = f"Retention {arm.label}"
            found[f"{engine}, API"] = f"{arm.url}/v1  (model {services.MODEL_NAME})"
            found[f"{engine}, Prometheus"] = f"{arm.url}/metrics"
            found[f"{engine}, events"] = f"{arm.events}  (replay {arm.replay})"
        if self.otlp and self.receiver is None:
            found["Traces"] = self.otlp
        found["Store"] = self.store
        found["Logs"] = f"{self.directory}/*.log"
        return found

    def stop(self) -> None:
        """End everything that was started, the last one first.

        A second Ctrl-C does not interrupt this, nor does a terminal that is gone.
        """
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            self.say("ending what was started")
        self._running.close()

    def _keep(self, service: Service) -> Service:
        self._running.callback(service.stop)
        return service

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def play(self, arm: Arm) -> list[TurnResult]:
        """Play the dialog against one engine."""
        self.say(f"playing {len(DIALOG)} turns with retention {arm.label}")
        return play(
            arm.url,
            f"demo-{arm.label}",
            on_turn=lambda index, turn: self.say(
                f"  turn {index}: {turn.cached} of {turn.prompt} prompt tokens cached, "
                f"{turn.completion} decoded   {turn.request_id}"
            ),
        )

    def check(self, off: list[TurnResult], on: list[TurnResult]) -> Iterator[Check]:
        """Every claim of the demo, as it is checked."""
        yield checks.more_is_reused(off, on)
        stored = self._settled([*off, *on])
        arms = (("off", off), ("on", on))
        for arm, turns in arms:
            told = {i: row["num_cached_tokens"] for i, row in stored.items()}
            yield checks.same_reuse(arm, turns, "in the store", told)
        for arm, turns in arms:
            ids = [turn.request_id for turn in turns]
            shown = evidence.reuse_on_pages(self.store, ids)
            yield checks.same_reuse(arm, turns, "on the page", shown)
        yield checks.reason_is_given(off, stored)
        if self.receiver is None:
            self.say(f"traces are not checked: they went to {self.otlp}")
            return
        spans = evidence.request_spans(self.receiver)
        told = {i: s.attributes.get(names.REUSE_DEPTH) for i, s in spans.items()}
        for arm, turns in arms:
            yield checks.same_reuse(arm, turns, "in the trace", told)
        yield checks.turns_are_linked(
            on, stored, spans, self.receiver.spans(names.CHECKPOINT_SPAN)
        )
        yield self._awaited_lives(self.receiver)

    def _awaited_lives(self, receiver: OtlpReceiver) -> Check:
        """The log records of the last stages come a moment after the spans."""

        def lives() -> Check:
            return checks.lives_are_whole(evidence.stages_of_checkpoints(receiver))

        with contextlib.suppress(TimeoutError):
            receiver.wait_for(lambda: not lives().problem, SETTLE_S)
        return lives()

    def _settled(self, turns: list[TurnResult]) -> dict[str, evidence.Row]:
        """The stored requests, once each turn is there and finished, and (where they
        come here) each turn's span as well."""
        wanted = {turn.request_id for turn in turns}
        deadline = time.monotonic() + SETTLE_S
        while True:
            stored = evidence.stored_requests(self.store)
            done = {i for i, row in stored.items() if row["status"] == "finished"}
            traced = evidence.request_spans(self.receiver) if self.receiver else wanted
            if (wanted <= done and wanted <= set(traced)) or (
                time.monotonic() > deadline
            ):
                return stored
            time.sleep(0.5)

    def check_reset(self) -> Iterator[Check]:
        """No block is held any more: vLLM resets its cache only then."""
        for arm in self.arms:
            yield Check(
                f"{arm.label}: all blocks are free again and the prefix cache resets",
                "" if reset_prefix_cache(arm.url) else "blocks are still held",
            )


@app.command()
def run(
    once: Annotated[
        bool, typer.Option(help="End after the checks: exit 0 if all hold.")
    ] = False,
    port: Annotated[
        int,
        typer.Option(help="The first of eight consecutive ports.", min=1, max=65528),
    ] = 8100,
    directory: Annotated[
        Path, typer.Option(help="Model, store, logs. An earlier demo's is emptied.")
    ] = Path(".demo"),
    otlp: Annotated[
        str | None, typer.Option(help="Send traces there instead of checking them.")
    ] = None,
) -> None:
    """Play one dialog against two engines, retention off and on, and compare."""
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    demo = Demo(directory, port, otlp)
    try:
        demo.start()
        off, on = demo.play(demo.off), demo.play(demo.on)
        print(f"\n{ab_table(off, on)}\n", flush=True)
        failed = _report(demo.check(off, on))
        if once:
            failed += _report(demo.check_reset())
        print(f"\n{'All checks hold.' if not failed else f'{failed} checks failed.'}")
        if not once:
            _stay_up(demo)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except Ended as ended:
        raise typer.Exit(128 + ended.number) from None
    finally:
        demo.stop()
    raise typer.Exit(1 if failed else 0)


def _report(found: Iterator[Check]) -> int:
    """Print each check; how many failed."""
    failed = 0
    for check in found:
        print(check, flush=True)
        failed += bool(check.problem)
    return failed


def _stay_up(demo: Demo) -> None:
    found = demo.addresses()
    width = max(map(len, found)) + 2
    lines = [f"{what:{width}}{address}" for what, address in found.items()]
    print("", *lines, "\nCtrl-C ends all of it.", sep="\n", flush=True)
    with contextlib.suppress(Ended):
        while True:
            time.sleep(3600)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


if __name__ == "__main__":
    app()
