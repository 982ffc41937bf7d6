"""The reference's experiment on one GPU, with times; see README.md.

    python benchmarks/gpu/run.py --arm exact_tail --out DIR    all that an arm is asked
    python benchmarks/gpu/run.py --out DIR JOB...              these jobs, in one engine
    python benchmarks/gpu/run.py merge FILE...                 tables of saved results

A job is an experiment and its arguments: ``dialog:arm=exact_tail,column=retained``.
Each result is saved as one JSON file as soon as there is one; ``--arm`` leaves out what
DIR has already, so that a call that was cut short goes on in the next one. With
``--follow DIR`` the engine stays up when the jobs are done and runs those that appear
in DIR, one file of jobs each, with the code as it is then: a start costs minutes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import arms
import model
import tables

EXPERIMENTS = {
    "weights": ("model", "redraw"),
    "warm_up": ("dialog", "warm_up_for"),
    "dialog": ("dialog", "run"),
    "throughput": ("throughput", "run"),
    "steps": ("dialog", "steps"),
    "one_step": ("dialog", "one_step"),
    "follow_ups": ("dialog", "follow_ups"),
    "workers": ("model", "workers"),
    "copy_cost": ("copying", "run"),
    "calibrate": ("truth", "calibrate"),
    "uninterrupted": ("truth", "against_uninterrupted"),
    "concurrent": ("truth", "concurrent"),
    "storm": ("truth", "storm"),
}
AT_START = {"retain": True, "events": {"enabled": True}}
"""What the engine is started with, through the plugin."""


def jobs_of(arm: str, *, tiny: bool = False) -> list[str]:
    """What one arm is asked by default; ``tiny``: what a CPU can do of it."""
    columns = ("short",) if tiny else ("stock", "retained")
    jobs = [f"warm_up:column={columns[-1]}"]
    jobs += [f"dialog:arm={arm},column={column}" for column in columns]
    if arm != "stock":
        jobs += [
            f"throughput:arm={arm},running={running},{rest}"
            for running, rest in (
                ((4, "groups=1,window=10,whole=60"),)
                if tiny
                else ((1, "window=256,groups=3,whole=1600"), (32, ""), (128, ""))
            )
        ]
    if arm in ("exact_tail", "everything"):
        jobs += [f"uninterrupted:arm={arm}" + (",dialogs=2" if tiny else "")]
    if tiny:
        jobs += [
            f"concurrent:arm={arm},available=60,conversations=6,check_every=4",
            f"storm:arm={arm},available=120,longest=1000,answer=60,seconds=20",
        ]
    else:
        jobs += [f"{job}:arm={arm},available=260" for job in ("concurrent", "storm")]
    return [job.rstrip(",") for job in jobs]


def main() -> int:
    if sys.argv[1:2] == ["merge"]:
        results = [json.loads(Path(name).read_text()) for name in sys.argv[2:]]
        print(tables.describe(results))
        return 0
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    folder = options.out / "model"
    if options.tiny:
        engine = model.start_tiny(folder, AT_START, options.tensor_parallel)
    else:
        engine = model.start_large(
            folder, options.layers, AT_START, options.tensor_parallel
        )
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **model.describe(engine),
        "start_s": round(time.perf_counter() - start, 1),
    }
    (options.out / "engine.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about), flush=True)
    jobs = options.jobs
    if options.arm is not None:
        jobs = [job for job in jobs if not _has_result(options.out, job)]
    results = run_jobs(engine, jobs, options.out)
    if options.follow is not None:
        results += _follow(engine, options.follow, options.out)
    if options.arm is not None:
        results = [_result(options.out, job) for job in options.jobs]
    print(tables.describe(results), flush=True)
    engine.engine_core.shutdown()  # left to the interpreter's exit, workers may hang
    return 1 if any("error" in result for result in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--arm", metavar="ARM", help="run all that ARM is asked")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--layers", type=int, help="of the model's 40 (default: all)")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs; from 2 on, workers in processes of their own",
    )
    parser.add_argument("--follow", type=Path, help="folder of further jobs")
    parser.add_argument(
        "--tiny", action="store_true", help="the tiny model on a CPU: a trial"
    )
    options = parser.parse_args()
    if options.arm is not None:
        if options.arm not in arms.ARMS:
            parser.error(
                f"there is no arm {options.arm!r}: choose of {', '.join(arms.ARMS)}."
            )
        options.jobs = jobs_of(options.arm, tiny=options.tiny) + options.jobs
    for job in options.jobs:
        try:
            _parse(job)
        except ValueError as error:
            parser.error(str(error))
    return options


def _parse(job: str) -> tuple[str, dict[str, Any]]:
    """``experiment:name=value,…``; values that are numbers become numbers."""
    experiment, _, rest = job.partition(":")
    if experiment not in EXPERIMENTS:
        raise ValueError(
            f"there is no experiment {experiment!r}: choose of "
            f"{', '.join(EXPERIMENTS)}."
        )
    arguments: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        name, _, value = pair.partition("=")
        try:
            arguments[name] = json.loads(value)
        except json.JSONDecodeError:
            arguments[name] = value
    return experiment, arguments


def run_jobs(engine: Any, jobs: Iterable[str], out: Path) -> list[dict[str, Any]]:
    """Run each job; one that fails is reported and the next one runs."""
    results = []
    for job in jobs:
        experiment, arguments = _parse(job)
        start = time.perf_counter()
        result: dict[str, Any] = {"experiment": experiment, "job": job}
        try:
            module, function = EXPERIMENTS[experiment]
            found = getattr(importlib.import_module(module), function)
            result |= found(engine, **arguments) or {}
        except Exception as error:
            traceback.print_exc()
            result["error"] = f"{type(error).__name__}: {error}"
        result["took_s"] = round(time.perf_counter() - start, 1)
        result["at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        _file(out, job).write_text(json.dumps(result) + "\n")
        print(f"{job}: {result['took_s']} s {result.get('error', '')}", flush=True)
        results.append(result)
        if "error" in result and engine.has_unfinished_requests():
            print("the engine holds unfinished requests: no job can follow")
            break
    return results


def _file(out: Path, job: str) -> Path:
    name = "".join(c if c.isalnum() else "_" for c in job)
    return out / f"{name}.json"


def _result(out: Path, job: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(_file(out, job).read_text())
    except FileNotFoundError:
        result = {"experiment": _parse(job)[0], "error": f"{job} did not run"}
    return result


def _has_result(out: Path, job: str) -> bool:
    """Warming up is no result: each engine needs its own."""
    return not job.startswith("warm_up") and "error" not in _result(out, job)


def _follow(engine: Any, folder: Path, out: Path) -> list[dict[str, Any]]:
    """Run the jobs of ``*.jobs`` files as they come, until one of them is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    while True:
        for file in sorted(folder.glob("*.jobs")):
            jobs = file.read_text().split()
            if not jobs:
                return results
            _forget_code()
            results += run_jobs(engine, jobs, out)
            file.rename(file.with_suffix(".done"))
        time.sleep(0.2)


def _forget_code() -> None:
    """The next job imports the experiments and the overlay anew."""
    here = {file.stem for file in Path(__file__).parent.glob("*.py")} - {"run"}
    for name in list(sys.modules):
        if name in here or name.split(".")[0] == "vllm_fork":
            del sys.modules[name]


if __name__ == "__main__":
    sys.exit(main())
