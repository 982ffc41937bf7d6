"""The images' locks hold what their packages require, in the versions of cpu.txt."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# What cpu.txt leaves out of vLLM's requirements, and says why; torch comes beside it.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
ROOTS = {
    "consumer": [*PROJECT["dependencies"], *OPTIONAL["postgres"]],
    "ui": ["msgspec", "sqlalchemy", *OPTIONAL["ui"], *OPTIONAL["postgres"]],
    "engine": [*PROJECT["dependencies"], *OPTIONAL["cpu"]],
}


def lock(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    pins = re.findall(r"(?m)^([\w.-]+)==(\S+)$", text)
    return {canonicalize_name(package): version for package, version in pins}


def closure(roots: Iterable[str]) -> set[str]:
    """What ``roots`` require on either Python, as the installed packages say."""
    waiting = [Requirement(root) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            requires = distribution(wanted.name).requires or []
        except PackageNotFoundError:
            # Required on the other Python alone, or left out.
            assert key[0] in LEFT_OUT | lock("cpu").keys(), wanted.name
            continue
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            if marker is None or any(
                marker.evaluate({"extra": extra, "python_version": python})
                for extra in {"", *wanted.extras}
                for python in ("3.11", "3.12")
            ):
                waiting.append(requirement)
    return {name for name, _ in seen}


@pytest.mark.parametrize("image", ROOTS)
def test_complete_and_no_more(image):
    assert lock(image).keys() == closure(ROOTS[image]) - LEFT_OUT


@pytest.mark.parametrize("image", ROOTS)
def test_versions_are_those_that_are_tested(image):
    assert lock(image).items() <= lock("cpu").items()
