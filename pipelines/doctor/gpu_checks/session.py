"""One session of all checks: launches the ranks, waits for them, and collects their results."""

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pipelines.doctor.gpu_checks.catalogue import CHECKS
from pipelines.doctor.gpu_checks.check import Result
from pipelines.home.examined import note_examined
from pipelines.home.home import Home
from pipelines.launchers import is_rank, job_file, launcher_of
from pipelines.processes.supervisor import Child, log_tail, supervise
from pipelines.running.gpu_slots import slot_environment
from specs.machine.files import read_json, write_json
from specs.machine.gpu_slots import TooFewSlotsError, leased, slots_here, slots_wanted
from specs.schema.experiment import Experiment

ALL = tuple(check.name for check in CHECKS)


class NoGpuError(Exception):
    """Error raised if there is no GPU to check, or if all GPUs are leased."""


def check_gpus(
    home: Home,
    experiment: Experiment | None = None,
    *,
    names: Collection[str] = ALL,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Runs the checks on this machine's GPUs, or on the machines on which a spec's launcher starts its ranks and
    engines.

    A spec with `resources: {device: cpu}` has them run on CPUs.

    Args:
        names: names of the checks.
        on_result: called with each result as it arrives, in this thread.
    Returns:
        A result for every check and rank, check by check.
    Raises:
        NoGpuError: no GPU is here, or all are leased.
    """
    slots = slots_here()
    experiment = experiment.on_all_machines if experiment else _on_all(len(slots))
    launcher, here = launcher_of(experiment), launcher_of(experiment).ranks_run_here
    on_cpu = experiment.resources.device == "cpu"
    if here and not slots and not on_cpu:
        raise NoGpuError(
            "this machine has no GPU: `nvidia-smi` lists none; run it on a GPU node, or give it a spec whose launcher"
            " has GPUs"
        )
    ranks = experiment.training.ranks
    with _directory(home) as directory, _leased(slots_wanted("cpu" if on_cpu or not here else "cuda", ranks)) as taken:
        out = directory / "results"
        out.mkdir()
        (directory / "spec.json").write_text(experiment.model_dump_json(), encoding="utf-8")
        job = {"device": "cpu" if on_cpu else "cuda", "checks": list(names), "out": str(out)}
        write_json(
            job_file(directory, "check"), {**job, "scratch": str(directory / "scratch"), "fingerprint": directory.name}
        )
        shown: set[str] = set()

        def show_new() -> None:
            for path in sorted(out.glob("*.json"), key=lambda path: path.stat().st_mtime):
                if path.name not in shown:
                    shown.add(path.name)
                    on_result(Result(**read_json(path)))

        log = directory / "launcher.log"
        command = launcher.command(directory, experiment, taken, stage="check")
        child = Child(
            stage="check",
            command=command,
            log=log,
            record=directory / "process.json",
            environment=slot_environment(taken),
            signal_children=launcher.signal_children and not is_rank(command),
            afterwards=lambda: launcher.end(directory),
        )
        code = supervise(child, stop=lambda: None, tick=show_new)
        show_new()
        results = list(_results(out, names, ranks, f"the ranks ended with code {code}: {_last_line(log)}; see {log}"))
    if not on_cpu:
        note_examined(home, {result.host for result in results}, experiment.launcher.type)
    return results


def _on_all(gpus: int) -> Experiment:
    """Returns a spec with this many local ranks; the checks ignore the rest of it."""
    return Experiment.model_validate(
        {
            "name": "gpu-checks",
            "model": {"source": "pretrained", "path": "random"},
            "data": {"train": [{"source": "parquet", "name": "random", "path": "random.parquet"}]},
            "reward": {"type": "exact_match"},
            "objective": {"type": "rpg"},
            "reference": {"source": "behaviour", "update": None},
            "training": {"steps": 1, "prompts_per_step": max(1, gpus), "group_size": 2, "ranks": max(1, gpus)},
            "resources": {"device": "cuda"},
        }
    )


@contextmanager
def _directory(home: Home) -> Iterator[Path]:
    """Yields a directory that all hosts see, like a run's. It is deleted unless checks fail, whose logs are in it."""
    home.create()
    place = home.root / "gpu-checks"
    place.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=place))
    failed = True
    try:
        yield directory
        results = [read_json(path) for path in (directory / "results").glob("*.json")]
        failed = any(result["status"] == "failed" for result in results)
    finally:
        shutil.rmtree(directory / "scratch" if failed else directory, ignore_errors=True)


@contextmanager
def _leased(count: int) -> Iterator[list[str]]:
    try:
        with leased(count, "rpg doctor --gpu", waiting=None) as slots:
            yield slots
    except TooFewSlotsError as error:
        raise NoGpuError(str(error)) from None


def _last_line(log: Path) -> str:
    return log_tail(log, 1).strip() or "it said nothing"


def _results(out: Path, names: Collection[str], ranks: int, missing: str) -> Iterator[Result]:
    for check in CHECKS:
        for rank in range(ranks) if check.name in names else ():
            path = out / f"{check.name}-{rank:05}.json"
            found = read_json(path)
            result = Result(**found) if found else Result(check.name, "failed", missing, rank=rank)
            if not found:
                write_json(path, asdict(result))
            yield result
