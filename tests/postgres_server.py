"""A PostgreSQL server of the tests' own: a fresh cluster on a socket, no TCP."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoPostgres(Exception):
    """No server can be started here; the message says why."""


@contextmanager
def running() -> Iterator[str]:
    """Start a server; give its URL with ``{database}`` in it.

    Raises:
        NoPostgres: it is not installed, or does not start.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise NoPostgres("no PostgreSQL server: apt-get install postgresql")
    binaries = found[-1].parent
    # Not below pytest's folders: each pytest run shuts those to other users.
    home = Path(tempfile.mkdtemp(prefix="vllm-fork-pg-"))
    user: str | None = None
    if os.geteuid() == 0:  # the server refuses to run as root
        user = "postgres"
        account = pwd.getpwnam(user)
        os.chown(home, account.pw_uid, account.pw_gid)

    def call(*command: str) -> None:
        done = subprocess.run(
            command,
            user=user,
            extra_groups=None if user is None else [],
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise NoPostgres(f"{Path(command[0]).name}: {done.stdout[-300:]}")

    data = str(home / "data")
    options = f"-c listen_addresses='' -c fsync=off -k {home}"
    control = str(binaries / "pg_ctl")
    try:
        call(str(binaries / "initdb"), "-D", data, "-A", "trust", "-U", "tester", "-N")
        call(control, "-D", data, "-w", "-l", str(home / "log"), "-o", options, "start")
        try:
            yield f"postgresql://tester@/{{database}}?host={home}"
        finally:
            call(control, "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)
