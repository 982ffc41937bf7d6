"""Where the demo looks requests up again, by the ids that the client saw: the store
(through the consumer's command), the traces, the dashboard's page."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from event_consumer import names
from event_consumer.otlp_receiver import OtlpReceiver, ReceivedSpan
from ui import settings as dashboard_settings
from vllm_fork.demo.processes import DemoError
from vllm_fork.demo.services import DASHBOARD

Row = dict[str, Any]
PAGE_TIMEOUT_S: Final = 30
_PAGE_LOGGER: Final = "streamlit.runtime.scriptrunner_utils.script_run_context"


def stored_requests(store: str) -> dict[str, Row]:
    """What ``event-consumer requests --json`` says, by the client's request id.

    Raises:
        DemoError: the command failed.
    """
    tool = Path(sys.executable).parent / "event-consumer"
    command = [str(tool), "requests", "--store", store, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        said = answer.stderr.strip().splitlines() or ["it said nothing"]
        raise DemoError(f"event-consumer requests failed: {said[-1]}")
    rows: list[Row] = json.loads(answer.stdout.splitlines()[-1])["requests"]
    return {row["external_request_id"]: row for row in rows}


def request_spans(receiver: OtlpReceiver) -> dict[str, ReceivedSpan]:
    """The spans of requests, by the client's request id."""
    spans = receiver.spans(names.REQUEST_SPAN)
    return {str(span.attributes.get(names.REQUEST_ID)): span for span in spans}


def stages_of_checkpoints(receiver: OtlpReceiver) -> dict[tuple[str, int], list[str]]:
    """The stages that log records tell of each checkpoint, by its trace and its id."""
    found: dict[tuple[str, int], list[str]] = {}
    for record in receiver.logs():
        checkpoint = record.attributes.get(names.CHECKPOINT_ID)
        if checkpoint is not None:
            key = (record.trace_id, int(checkpoint))
            found.setdefault(key, []).append(record.event_name)
    return found


def reuse_on_pages(store: str, request_ids: Sequence[str]) -> Mapping[str, int]:
    """The figure "Reused" of the Request page, rendered for each id.

    The app runs in this process, as Streamlit's own test harness runs it. Ids for
    which the page shows no such figure are left out.

    Raises:
        DemoError: the page failed.
    """
    from streamlit.testing.v1 import AppTest

    # It warns of every page that no browser asked for.
    logging.getLogger(_PAGE_LOGGER).disabled = True
    os.environ[dashboard_settings.STORE_VARIABLE] = store
    found: dict[str, int] = {}
    for request_id in request_ids:
        app = AppTest.from_file(DASHBOARD, default_timeout=PAGE_TIMEOUT_S).run()
        app.query_params["request"] = request_id
        page = app.switch_page("views/request.py").run()
        if page.exception:
            raise DemoError(f"the Request page failed: {page.exception[0].message}")
        shown = {metric.label: metric.value for metric in page.metric}
        figure = shown.get("Reused", "").replace(",", "")
        if figure.isdigit():
            found[request_id] = int(figure)
    return found
