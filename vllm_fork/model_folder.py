"""Whether a local folder can be that of a model, as far as its files tell.

vLLM finds out in its engine, some time after the start, and tells in tracebacks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""What vLLM's ``--load-format auto`` can read."""
TOKENIZERS: Final = (
    "tokenizer*",
    "vocab*",
    "tekken*",
    "*.tiktoken",
    "*.spm",
    "spiece*",
)
_LFS: Final = "a Git LFS pointer perhaps, or half a download"


def why_no_configuration(folder: Path) -> str | None:
    """One sentence if its ``config.json`` is none; there may be another file in its
    place."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    except (ValueError, RecursionError) as error:
        return f"{path} is not JSON ({error}): expected a model's configuration."
    if not isinstance(content, dict):
        return f"{path} is not an object: expected a model's configuration."
    return None


def why_no_weights(folder: Path) -> str | None:
    """One sentence if it holds no weights, or such as cannot be read."""
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return f"There are no weights in {folder}: expected *.safetensors or *.bin."
    for path in sorted(folder.glob("*.safetensors")):
        if not _is_safetensors(path):
            return f"{path} is no safetensors file ({_LFS}): copy the weights again."
    return None


def why_no_tokenizer(folder: Path) -> str | None:
    """One sentence if it holds no tokenizer, or one that cannot be read."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        return f"There is no tokenizer in {folder}: name one with --tokenizer."
    path = folder / "tokenizer.json"
    if path.is_file() and not path.read_bytes()[:64].lstrip().startswith(b"{"):
        return f"{path} is not JSON ({_LFS}): copy the tokenizer again."
    return None


def _is_safetensors(path: Path) -> bool:
    """By its first bytes: the header's length, then the header, a JSON object."""
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    return start[8:] == b"{" and 8 + length <= path.stat().st_size
