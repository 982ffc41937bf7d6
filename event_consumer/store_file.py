"""What keeps a file from being an SQLite store, in words: for the consumer, its
queries and the dashboard alike. Imports nothing of any of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

MAGIC: Final = b"SQLite format 3\0"
DAMAGED: Final = ("malformed", "not a database", "file is encrypted")
"""What SQLite says of a file whose pages make no sense."""


class Obstacle(NamedTuple):
    """``what`` is wrong with the file, and what to do about it; parts of a sentence."""

    what: str
    remedy: str


def obstacle(path: Path, *, to_write: bool) -> Obstacle | None:
    """What keeps ``path`` from being opened as a store; None where nothing is seen.

    That there is no file yet is no obstacle: a consumer makes it.
    """
    folder = path.parent
    try:
        if path.is_dir():
            return Obstacle(
                f"{path} is a folder",
                f"name a file in it, such as sqlite:///{path}/vllm-fork.db",
            )
        if not folder.is_dir():
            if folder.exists():
                return Obstacle(
                    f"{folder} is a file, not a folder", "name another store"
                )
            return Obstacle(
                f"there is no folder {folder}",
                f"make it with `mkdir -p {folder}`, or name another store",
            )
        if not path.exists():
            writable = not to_write or os.access(folder, os.W_OK)
            return None if writable else _not_permitted(folder, "write")
        return _obstacle_of_file(path, to_write)
    except OSError as error:
        return Obstacle(
            f"{path} cannot be reached ({error.strerror or error})",
            "check the path, and who may read it",
        )


def _obstacle_of_file(path: Path, to_write: bool) -> Obstacle | None:
    if not os.access(path, os.R_OK):
        return _not_permitted(path, "read")
    # SQLite keeps its journal beside the file.
    for each in (path, path.parent):
        if to_write and not os.access(each, os.W_OK):
            return _not_permitted(each, "write")
    if path.is_file():
        with path.open("rb") as file:
            begins = file.read(len(MAGIC))
        if begins and begins != MAGIC:
            return Obstacle(f"{path} is not an SQLite database", "name another store")
    return None


def _not_permitted(path: Path, doing: str) -> Obstacle:
    return Obstacle(
        f"this user may not {doing} {path}",
        "change its mode or owner (chmod, chown), or run as another user",
    )


def damage(path: Path, reason: str) -> Obstacle | None:
    """What to do where SQLite finds the file damaged, and says so as ``reason``."""
    if not any(words in reason for words in DAMAGED):
        return None
    return Obstacle(
        f"{path} is damaged ({reason})",
        "bring back a copy, or move the file away and let `event-consumer run` make a "
        "new one",
    )
