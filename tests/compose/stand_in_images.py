"""Stand-ins for the public images, which a test cannot pull.

``python`` is Debian's minimal system with an interpreter of this machine copied into
/usr/local, as the official image has it; ``postgres`` is Debian's PostgreSQL; in place
of Jaeger runs the project's OTLP receiver, which tells what arrived. On the test's own
engine they bear the public names, so that docker-compose.yml runs as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from docker_engine import CACHE, Docker, NoDocker, debian_mirror

HERE = Path(__file__).parent / "stand_ins"
PYTHON = "python:3.12-slim-bookworm"
POSTGRES = "postgres:17.9-bookworm"
JAEGER = "jaegertracing/jaeger:2.15.0"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SEARCH_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
BUILD_S = 900


class Names(NamedTuple):
    """What the stand-ins are called. ``engine_python`` is the interpreter's base for
    the CPU engine: of the version for which this machine has the CPU build of torch."""

    python: str
    engine_python: str
    postgres: str
    jaeger: str


def names(docker: Docker) -> Names:
    """Public names on an engine of our own, private ones elsewhere."""
    prefix = "" if docker.own else "vllm-fork-stand-in/"
    here = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm"
    return Names(*(prefix + name for name in (PYTHON, here, POSTGRES, JAEGER)))


def make_pythons(docker: Docker, wanted: Names) -> None:
    """Import the base images that are not there yet.

    Raises:
        NoDocker: a tool that it takes is missing.
    """
    interpreters = {wanted.engine_python: Path(sys.executable)}
    interpreters.setdefault(wanted.python, _python_312() or Path(sys.executable))
    for name, interpreter in interpreters.items():
        if docker("image", "inspect", name, check=False).returncode:
            _import_python(docker, name, interpreter)


def make_postgres(docker: Docker, wanted: Names) -> None:
    """Build the stand-in for PostgreSQL."""
    _build(docker, "postgres", wanted.postgres, base=wanted.python)


def make_jaeger(docker: Docker, wanted: Names, consumer_image: str) -> None:
    """Build the stand-in for Jaeger, from the consumer's image."""
    _build(docker, "jaeger", wanted.jaeger, base=consumer_image)


def _build(docker: Docker, kind: str, name: str, base: str) -> None:
    docker(
        *("build", "--quiet", "--network", "host", "--tag", name),
        *("--build-arg", f"BASE={base}"),
        *("--file", str(HERE / f"{kind}.Dockerfile"), str(HERE)),
        timeout_s=BUILD_S,
    )


def _python_312() -> Path | None:
    """An interpreter of the version that the images ask for."""
    candidates = [
        *([found] if (found := shutil.which("python3.12")) else []),
        *sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")),
    ]
    for candidate in candidates:
        if _ask(candidate, "import venv, ensurepip, sys; print(sys.version_info[1])"):
            return Path(candidate)
    return None


def _ask(interpreter: str | Path, question: str) -> str:
    done = subprocess.run(
        [interpreter, "-c", question], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _import_python(docker: Docker, name: str, interpreter: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        root = Path(folder)
        root.chmod(0o755)
        subprocess.run(["tar", "-C", root, "-xf", _debian()], check=True)
        _copy_interpreter(interpreter, root)
        tar = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
        changes = [f"ENV PATH={SEARCH_PATH}", "ENV LANG=C.UTF-8", 'CMD ["python3"]']
        docker(
            "import",
            *(f"--change={change}" for change in changes),
            *("-", name),
            timeout_s=300,
            stdin=tar.stdout,
        )
        assert tar.wait() == 0


def _debian() -> Path:
    """A tar file of Debian 12's minimal system, made once."""
    kept = CACHE / "bookworm.tar"
    if kept.exists():
        return kept
    if not shutil.which("debootstrap"):
        raise NoDocker("debootstrap is not installed")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        root = Path(folder) / "root"
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", root, debian_mirror()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode != 0:
            raise NoDocker(f"debootstrap failed: {done.stdout.strip()[-200:]}")
        # The official image has none of it either.
        for unwanted in ("doc", "man", "info", "locale", "lintian", "bug"):
            shutil.rmtree(root / "usr/share" / unwanted, ignore_errors=True)
        for lists in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(root / lists)
            (root / lists).mkdir()
        if CERTIFICATES.exists():
            # Those this machine trusts: its way to the package index may be its own.
            (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
            shutil.copy(CERTIFICATES, root / "etc/ssl/certs")
        part = kept.with_suffix(".part")
        subprocess.run(["tar", "-C", root, "-cf", part, "."], check=True)
        part.rename(kept)
    return kept


def _copy_interpreter(interpreter: Path, root: Path) -> None:
    """The interpreter, its library and pip go to /usr/local, with the shared libraries
    that they need and ``root`` lacks."""
    home = Path(_ask(interpreter, "import sys; print(sys.base_prefix)"))
    version = _ask(interpreter, "import sys; print('%d.%d' % sys.version_info[:2])")
    local = root / "usr/local"
    library = f"lib/python{version}"
    ignored = shutil.ignore_patterns(
        *("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo"),
        *("site-packages", "dist-packages", "_tkinter*", "config-*"),
    )
    shutil.copytree(home / library, local / library, symlinks=True, ignore=ignored)
    (local / "bin").mkdir(exist_ok=True)
    shutil.copy(home / "bin" / f"python{version}", local / "bin")
    for alias in ("python", "python3"):
        (local / "bin" / alias).symlink_to(f"python{version}")
    shutil.copytree(home / "include", local / "include", dirs_exist_ok=True)
    programs = [home / "bin" / f"python{version}"]
    programs += (home / library / "lib-dynload").glob("*.so")
    for needed in _shared_libraries(programs):
        if not (root / "lib/x86_64-linux-gnu" / needed.name).exists():
            shutil.copy(needed, local / "lib")
            _strip(local / "lib" / needed.name)
    subprocess.run(["chroot", root, "ldconfig"], check=True)
    subprocess.run(
        ["chroot", root, "/usr/local/bin/python3", "-m", "ensurepip", "--default-pip"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": SEARCH_PATH},
    )
    for compiled in [*local.rglob("__pycache__")]:
        shutil.rmtree(compiled)


def _shared_libraries(programs: Sequence[Path]) -> set[Path]:
    # Not the tkinter module's: nothing else here draws windows.
    wanted = [str(p) for p in programs if not p.name.startswith("_tkinter")]
    listed = subprocess.run(["ldd", *wanted], capture_output=True, text=True)
    found = (
        line.partition(" => ")[2].split(" ")[0] for line in listed.stdout.split("\n")
    )
    return {Path(path) for path in found if path.startswith("/")}


def _strip(library: Path) -> None:
    """Leave out symbols, as the official image does, where there is a tool for it."""
    if shutil.which("strip"):
        os.chmod(library, 0o755)
        subprocess.run(["strip", "--strip-unneeded", library], check=False)
