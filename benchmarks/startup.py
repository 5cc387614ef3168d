"""CPU seconds of the everyday commands with a tiny model, where nearly all of them are the start of processes.

    python benchmarks/startup.py [--only two-steps plan] [--trials 30]

Each command runs in a home of its own kind: a new one, or one in which the tiny experiment has run. CPU seconds are
user and system time of the command and of every process that it started, those that outlived their parent included;
`parts` is what of it went to which kind of process, as looked at every 50 ms.
"""

import argparse
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.05
SPEC = """\
name: tiny
question: How long does a start take?
model:
  source: scratch
  model_type: qwen3
  config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
           head_dim: 16, max_position_embeddings: 64, tie_word_embeddings: true}
  tokenizer: {type: bytes}
data:
  train:
    - {source: reasoning_gym, task: chain_sum, size: 60, seed: 100000,
       config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  evaluation:
    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 10, seed: 900000,
       config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  prompt: {type: template, template: "{metadata.expression} ="}
  overlap: drop
  max_prompt_length: 16
warm_up: {steps: 5, batch_size: 16}
rollout: {engine: transformers, max_response_length: 4}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2}
training:
  steps: 2
  prompts_per_step: 4
  group_size: 4
  minibatches: 2
  optimizer: {learning_rate: 1.0e-4}
  checkpoint: {every_steps: 2}
evaluation: {samples_per_problem: 2}
"""
STUDY = """\
name: rates
experiment: tiny.yaml
parameters:
  training.optimizer.learning_rate: {float: [1.0e-5, 1.0e-2], log: true}
goal: {dataset: held_out, metric: mean@2}
trials: TRIALS
"""
KINDS = {
    "rpg.train": "train",
    "start_ranks": "launcher",
    "rpg.stage": "stage",
    "api_process": "Prefect's API",
    "fork_server": "imports of the stages",
    "rpg.sandbox": "sandbox",
}
"""Words of a command line, and the kind of process that has it."""


@dataclass
class Measured:
    """The cost of one command."""

    cpu_seconds: float
    wall_seconds: float
    parts: dict[str, float]


def kind_of(process: psutil.Process, command: int) -> str:
    """Returns the purpose of a process of the command."""
    if process.pid == command:
        return "command"
    words = " ".join(process.cmdline())
    stage = next((Path(word).name.partition("-")[0] for word in words.split() if word.endswith("-job.json")), "")
    return stage or next((kind for word, kind in KINDS.items() if word in words), "other")


def measure(arguments: list[str], home: Path) -> Measured:
    """Runs `rpg ARGUMENTS` with a home, to its end and that of all that it started."""
    before, started = _waited_for(), time.monotonic()
    kept = {"XDG_CACHE_HOME": str(home.with_name("cache"))}  # result of a look, and a count
    environment = {**os.environ, **kept, "RPG_HOME": str(home), "OMP_NUM_THREADS": "1"}
    rpg = [sys.executable, "-c", "from pipelines.cli import main; main()"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*rpg, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT)
        seen: dict[psutil.Process, tuple[str, float]] = {}
        while process.poll() is None:
            for member, kind, seconds in _members(process.pid):
                # What a fork, or a program that replaces another, is for shows once it is named.
                seen[member] = (kind if kind != "other" or member not in seen else seen[member][0], seconds)
            time.sleep(_LOOK_SECONDS)
        if process.returncode:
            output.seek(0)
            sys.exit(f"rpg {' '.join(arguments)}: exit code {process.returncode}\n{output.read().decode()}")
    wall = time.monotonic() - started
    _wait_for_orphans()
    parts: dict[str, float] = defaultdict(float)
    for kind, seconds in seen.values():
        parts[kind] += seconds
    return Measured(_waited_for() - before, wall, parts)


def _members(command: int) -> Iterator[tuple[psutil.Process, str, float]]:
    try:
        members = psutil.Process(os.getpid()).children(recursive=True)
    except psutil.Error:
        return
    for member in members:
        try:
            times = member.cpu_times()
            yield member, kind_of(member, command), times.user + times.system
        except psutil.Error:
            continue


def _waited_for() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for_orphans() -> None:
    """Waits for processes whose parent has ended: they are this one's children since."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def commands(spec: Path, trials: int) -> dict[str, tuple[str, list[list[str]]]]:
    """Name of each measurement: the home that it begins in (a user's first, a new one, or one that the tiny experiment
    has run in), and commands, the last of which is measured."""
    run = ["run", str(spec)]
    deep = ["validate", "--deep", str(spec), "--set"]
    lr = ["--set", "training.optimizer.learning_rate=2e-4"]
    return {
        "two steps, first home": ("first", [run]),
        "two steps, new home": ("new", [run]),
        "two steps, known home": ("known", [[*run, *lr]]),
        "cached run": ("known", [run]),
        "plan": ("known", [["plan", str(spec)], ["plan", str(spec), *lr]]),
        "validate --deep, new model": ("known", [[*deep, "model.config.intermediate_size=96"]]),
        "validate --deep, new problems": ("known", [[*deep, "data.max_prompt_length=17"]]),
        "evaluate, two models": ("known", [["evaluate", str(spec.with_name("evaluation.yaml"))]]),
        "matrix of 12": ("known", [[*run, "--set", "seeds=[1,2,3,4,5,6,7,8,9,10,11,12]"]]),
        f"study of {trials} trials": ("known", [["study", "run", str(spec.with_name("study.yaml"))]]),
    }


def write_evaluation(spec: Path, weights: Path) -> None:
    """Writes an evaluation of two models, which have the same architecture and other weights: the run's and chance."""
    fields = yaml.safe_load(spec.read_text())
    chance = {"name": "chance", "source": "scratch", **{key: fields["model"][key] for key in ("model_type", "config")}}
    evaluation = {
        "name": "two",
        "models": [{"name": "trained", "path": str(weights)}, chance | {"tokenizer": fields["model"]["tokenizer"]}],
        "data": {
            "evaluation": fields["data"]["evaluation"],
            "prompt": fields["data"]["prompt"],
            "max_prompt_length": 16,
        },
        **{key: fields[key] for key in ("rollout", "reward", "evaluation")},
    }
    spec.with_name("evaluation.yaml").write_text("# evaluation\n" + yaml.safe_dump(evaluation, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of measurements, or their beginnings")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="directory with the known home; created if missing")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(exist_ok=True)
        spec, known = directory / "tiny.yaml", directory / "known"
        spec.write_text(SPEC)
        spec.with_name("study.yaml").write_text(STUDY.replace("TRIALS", str(arguments.trials)))
        if not known.exists():
            measure(["run", str(spec)], known)
        write_evaluation(spec, max(known.glob("runs/*/weights/step-*")))
        print(f"{'':30}{'CPU s':>8}{'wall s':>8}  parts, CPU s")
        for name, (kind, asked) in commands(spec, arguments.trials).items():
            if arguments.only and not name.startswith(tuple(arguments.only)):
                continue
            home = directory / "home"
            if kind == "known":
                shutil.copytree(known, home)
            elif kind == "first":  # nothing is kept yet of Prefect's database, or of looks at models
                shutil.rmtree(home.with_name("assets"), ignore_errors=True)
            took = [measure(command, home) for command in asked][-1]
            parts = ", ".join(
                f"{part} {seconds:.1f}" for part, seconds in sorted(took.parts.items(), key=lambda each: -each[1])
            )
            print(f"{name:30}{took.cpu_seconds:8.1f}{took.wall_seconds:8.1f}  {parts}", flush=True)
            shutil.rmtree(home)


if __name__ == "__main__":
    main()
