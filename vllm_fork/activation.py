"""Whether vLLM will load this project's plugin in every one of its processes.

vLLM only logs a plugin that it cannot load, and goes on without it: so
``vllm-fork serve`` and ``vllm-fork doctor`` look first.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final

GROUP: Final = "vllm.general_plugins"
NAME: Final = "vllm_fork"
ALLOW_LIST_ENV: Final = "VLLM_PLUGINS"


def why_inactive(environ: Mapping[str, str]) -> str | None:
    """One sentence on why the plugin would not be loaded; None if it would."""
    found = entry_points(group=GROUP, name=NAME)
    if not found:
        return (
            f"This environment has no {GROUP} plugin {NAME}: install vllm-fork into "
            "the environment that runs vLLM."
        )
    allowed = environ.get(ALLOW_LIST_ENV)
    if allowed is not None and NAME not in allowed.split(","):
        wanted = f"{allowed},{NAME}" if allowed else NAME
        return (
            f"{ALLOW_LIST_ENV} is {allowed!r}, which does not name {NAME}, so vLLM "
            f"would run without it: set {ALLOW_LIST_ENV}={wanted}, or unset it."
        )
    try:
        next(iter(found)).load()
    except Exception as error:
        return (
            f"The plugin {NAME} cannot be imported ({type(error).__name__}: {error}): "
            "reinstall vllm-fork."
        )
    return None
