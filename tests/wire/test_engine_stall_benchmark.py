"""The benchmark runs, and no arm of it loses an event uncounted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine_stall.py"


@pytest.mark.nightly
def test_engine_stall():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "5", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["median_us"]) == set(result["p99_us"])
    events = result["events"]
    assert events["full_queue"]["dropped"] > 0
    assert events["port_taken"]["sent"] == 0
    assert events["encode_error"]["encode_errors"] > 0
    for arm in events.values():
        told = arm["sent"] + arm["dropped"] + arm["encode_errors"]
        assert told == arm["published"]
