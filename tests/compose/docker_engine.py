"""A Docker engine for the test, and Compose for it.

The engine that runs already, or one of the test's own: Debian's ``dockerd`` on a
socket of its own, ended by its pid file. It changes nothing of the host's firewall and
makes no default bridge: what the test needs of the network are bridges of Compose's
and ports on loopback. Images and build cache are kept in ``CACHE`` between runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / "vllm-fork-compose"
)
RUN = Path("/run/vllm-fork-compose")
"""Sockets: their paths must be short."""
TOOLS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
}
COMPOSE_SUITE = "trixie"
"""The Debian release that has Compose v2; its binary runs on the one before too."""
START_S = 60.0


class NoDocker(Exception):
    """No Docker engine can be had here; the message says why."""


@dataclass(frozen=True)
class Docker:
    """``docker`` with the environment that finds the engine and Compose.

    ``own`` tells an engine of the test's own from one that others use, where images
    must not be given the names of public ones.
    """

    environment: Mapping[str, str]
    own: bool

    def __call__(
        self,
        *arguments: str,
        timeout_s: float = 120,
        check: bool = True,
        stdin: Any = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``docker ARGUMENTS``; what it says comes back as text.

        Raises:
            AssertionError: it failed, with the end of what it said.
        """
        done = subprocess.run(
            ["docker", *arguments],
            env={**self.environment, **(environment or {})},
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            said = (done.stdout + done.stderr).strip()[-4000:]
            raise AssertionError(f"docker {' '.join(arguments)} failed:\n{said}")
        return done

    def lines(self, *arguments: str) -> list[str]:
        """The lines that ``docker ARGUMENTS`` prints."""
        return self(*arguments).stdout.split()

    def inspect(self, name: str) -> dict[str, Any]:
        """What the engine knows of a container or image."""
        found: dict[str, Any] = json.loads(self("inspect", name).stdout)[0]
        return found


@contextlib.contextmanager
def running() -> Iterator[Docker]:
    """The engine that runs here, or one that is started and ended again.

    Raises:
        NoDocker: neither.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    # Where Debian keeps root's tools: not every shell's path has it.
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if shutil.which("docker") and _answers(os.environ):
        yield Docker(_with_compose(os.environ), own=False)
        return
    _install_missing()
    _refuse_a_second_engine()
    with _own_engine() as host:
        yield Docker(_with_compose({**os.environ, "DOCKER_HOST": host}), own=True)


def _answers(environment: Mapping[str, str]) -> bool:
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return not subprocess.run(
            command, env=dict(environment), capture_output=True, timeout=20, check=False
        ).returncode
    return False


def _install_missing() -> None:
    if os.geteuid() != 0:
        raise NoDocker("no engine answers, and only root can start one")
    missing = {package for tool, package in TOOLS.items() if not shutil.which(tool)}
    if missing and not shutil.which("apt-get"):
        raise NoDocker(f"no engine answers, and apt-get cannot install {missing}")
    if missing:
        _apt("update", "-qq")
        _apt("install", "-y", "-qq", "--no-install-recommends", *sorted(missing))


def _apt(*arguments: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise NoDocker(f"apt-get {' '.join(arguments)} failed: {said[-1]}")


def _refuse_a_second_engine() -> None:
    """Two engines on one host share firewall chains and bridges."""
    for process in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if process.read_text().strip() == "dockerd":
                raise NoDocker(
                    f"a dockerd runs (process {process.parent.name}) that does not "
                    "answer here: set DOCKER_HOST to its socket, or end it"
                )


@contextlib.contextmanager
def _own_engine() -> Iterator[str]:
    """Start ``dockerd``; give its address."""
    RUN.mkdir(exist_ok=True)
    pid_file = RUN / "docker.pid"
    pid_file.unlink(missing_ok=True)
    host = f"unix://{RUN}/docker.sock"
    log = CACHE / "dockerd.log"
    command = [
        "dockerd",
        *("--data-root", str(CACHE / "docker"), "--exec-root", str(RUN / "exec")),
        *("--pidfile", str(pid_file), "--host", host),
        *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
        *("--ip-forward=false", "--ip-masq=false"),
    ]
    with log.open("wb") as output:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _answers({**os.environ, "DOCKER_HOST": host}):
            if engine.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()
                raise NoDocker(f"dockerd does not start: {said[-1] if said else '?'}")
            time.sleep(0.5)
        yield host
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        try:
            engine.wait(60)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()
        # dockerd leaves the host's network namespace mounted there.
        for left in RUN.glob("exec/netns/*"):
            subprocess.run(["umount", left], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(RUN, ignore_errors=True)


def _with_compose(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which ``docker compose`` is Compose v2."""
    given = dict(environment)
    if _compose_version(given):
        return given
    configuration = CACHE / "docker-config"
    plugin = configuration / "cli-plugins" / "docker-compose"
    if not plugin.exists():
        plugin.parent.mkdir(parents=True, exist_ok=True)
        _fetch_compose(plugin)
    given["DOCKER_CONFIG"] = str(configuration)
    if not _compose_version(given):
        raise NoDocker("Compose v2 from Debian's package does not run here")
    return given


def _compose_version(environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["docker", "compose", "version", "--short"],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _fetch_compose(plugin: Path) -> None:
    """Take the plugin out of Debian's package, with apt lists of our own."""
    if not shutil.which("apt-get"):
        raise NoDocker("docker has no Compose v2 (plugin docker-compose)")
    state = CACHE / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    source = state / "sources.list"
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    source.write_text(
        f"deb [signed-by={keyring}] {debian_mirror()} {COMPOSE_SUITE} main\n"
    )
    own = [
        *("-o", f"Dir::Etc::sourcelist={source}", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::lists={state}/lists", "-o", f"Dir::Cache={state}/cache"),
        *("-o", "APT::Sandbox::User=root"),
    ]
    _apt(*own, "update", "-qq")
    _apt(*own, "download", "-qq", "docker-compose", cwd=state)
    package = next(state.glob("docker-compose_*.deb"))
    subprocess.run(["dpkg-deb", "-x", package, state / "unpacked"], check=True)
    found = next((state / "unpacked").glob("usr/libexec/docker/cli-plugins/*"))
    shutil.copy(found, plugin)
    shutil.rmtree(state)


def debian_mirror() -> str:
    """The address from which this machine takes Debian's packages.

    Raises:
        NoDocker: it takes none.
    """
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm"],
        capture_output=True,
        text=True,
        check=False,
    )
    for address in done.stdout.split():
        return address.rstrip("/")
    raise NoDocker("this is no machine with Debian 12's package lists")


def wait_until(what: str, condition: Any, timeout_s: float, poll_s: float = 1.0) -> Any:
    """Poll ``condition`` until it is true; its value.

    Raises:
        AssertionError: it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(poll_s)


def of_project(docker: Docker, project: str) -> dict[str, Sequence[str]]:
    """What the engine still has of a Compose project."""
    label = f"label=com.docker.compose.project={project}"
    return {
        "containers": docker.lines("ps", "--all", "--quiet", "--filter", label),
        "volumes": docker.lines("volume", "ls", "--quiet", "--filter", label),
        "networks": docker.lines("network", "ls", "--quiet", "--filter", label),
    }
