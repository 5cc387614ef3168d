"""Real runs of a tiny experiment through the command line, and looking at what they leave."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from waiting import wait_for

from pipelines.home.home import Home
from specs.machine.files import read_json
from specs.machine.liveness import FINAL
from storage import Store
from tests.forks import Fork, fork

COMMAND = "from pipelines.cli import main; main()"
"""The command line, as a program for `python -c`."""
SPEC = """\
name: tiny
question: Does a run survive what is done to it?
model:
  source: scratch
  model_type: qwen3
  config:
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 1
    head_dim: 16
    max_position_embeddings: 64
    tie_word_embeddings: true
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
  steps: 6
  prompts_per_step: 4
  group_size: 4
  minibatches: 2
  optimizer: {learning_rate: 1.0e-4}
  checkpoint: {every_steps: 2}
evaluation: {samples_per_problem: 2}
"""


SIGNAL = ("reward.type=math_dapo", "advantage.baseline=none")
"""Values with which every response has the advantage -1, so that there is a gradient though no answer is right. Without
one all weights are those of the base model, whatever is done to a run."""
ELSEWHERE = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$0" "$@"')
"""The prefix of a command that runs on this machine under another host's name."""

Started = subprocess.Popen[str] | Fork


@dataclass
class Lab:
    """A home of its own, a spec file, and the command line."""

    root: Path
    spec: Path
    started: list[Started] = field(default_factory=list)

    @property
    def home(self) -> Home:
        return Home(self.root)

    def start(
        self, *arguments: str, overrides: tuple[str, ...] = (), prefix: tuple[str, ...] = (), anew: bool = False
    ) -> Started:
        """`rpg ...` in the background, in a session of its own.

        Args:
            overrides: values for `--set`.
            prefix: a command that runs it.
            anew: it imports for itself, as a user's does. A fork of what has its imports takes half the time.
        """
        words = [*arguments, *(word for override in overrides for word in ("--set", override))]
        forked = None if prefix or anew else self._fork(words)
        return forked or self.start_program(COMMAND, *words, prefix=prefix)

    def _fork(self, words: list[str]) -> Fork | None:
        environment = {**os.environ, "RPG_HOME": str(self.root), "OMP_NUM_THREADS": "1"}
        ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
        output, errors = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115 (read when it has ended)
        asked = {"output": output.name, "errors": errors.name, "environment": environment, "ignored": ignored}
        request = tempfile.NamedTemporaryFile("w", suffix=".json", delete=False)  # noqa: SIM115 (the fork reads it)
        with request:
            json.dump({**asked, "words": words}, request)
        program = ["tests.pipelines.forked_command", request.name]
        forked = fork(program, output, environment)
        if forked is None:
            os.unlink(request.name)
            return None
        command = Fork(forked, output, errors)
        self.started.append(command)
        return command

    def start_program(self, program: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """A Python program in the background, in a session of its own. `prefix`: a command that runs it."""
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", program, *arguments],
            env=os.environ | {"RPG_HOME": str(self.root), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def rpg(
        self,
        *arguments: str,
        overrides: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        anew: bool = False,
        timeout: float = 240,
    ) -> "Finished":
        """`rpg ...` to its end: see `start`."""
        return finished(self.start(*arguments, overrides=overrides, prefix=prefix, anew=anew), timeout)

    def run_ids(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("runs/*"))

    def state(self, run_id: str) -> dict[str, Any]:
        return read_json(self.home.run(run_id) / "state.json")

    def wait_until(self, run_id: str, status: str, *, timeout: float = 120) -> None:
        """Waits for a status of a run; on another end, or none, raises with the run's own messages."""

        def has_come() -> bool:
            now = self.state(run_id)["status"]
            assert now == status or now not in FINAL, self.account(run_id)
            return bool(now == status)

        try:
            wait_for(has_come, timeout=timeout, what=f"{run_id} to be {status}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.account(run_id)}") from None

    def account(self, run_id: str) -> str:
        """What a run's files say of it, its processes, and the ends of the logs around it."""
        processes = [f"{each.pid} {each.status()} {' '.join(each.cmdline())[:150]}" for each in self.processes()]
        logs = [*self.home.run(run_id).glob("logs/*"), *self.home.prefect.glob("*.log")]
        tails = [f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.is_file()]
        return "\n".join([json.dumps(self.state(run_id)), *processes, *tails])

    def training_pid(self) -> int:
        """The process that the supervisor started for training; 0 while there is none."""
        for path in self.root.glob("runs/*/process.json"):
            record = read_json(path)
            if record.get("stage") == "train":
                return int(record["pid"])
        return 0

    def progress(self, run_id: str) -> int:
        """Steps that the trainer has reported."""
        return int(read_json(self.home.run(run_id) / "progress.json").get("step", 0))

    def processes(self) -> list[psutil.Process]:
        """Everything that lives and was started for this home, but for the tracker of resources of `multiprocessing`,
        which ends a moment after its command."""
        processes = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("RPG_HOME") == str(self.root)
                is_tracker = "multiprocessing.resource_tracker" in str(process.cmdline())
                if ours and not is_tracker and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except (psutil.Error, OSError):
                continue
        return processes

    def query(self, sql: str) -> list[Any]:
        with Store.open(self.root) as store:
            return list(store.query(sql).rows)

    def assert_trained(self, run_id: str) -> None:
        """Every step had a gradient, and the last weights are not the base model's: those that equal them say
        something."""
        norms = self.query(f"SELECT value FROM metrics WHERE name = 'grad_norm' AND run_id = '{run_id}'")
        assert norms
        assert all(norm > 0 for (norm,) in norms)
        base = read_json(self.home.run(run_id) / "plan.json")["stages"]["base"]["fingerprint"]
        last = max(self.home.run(run_id).glob("weights/step-*"))
        before, after = (
            load_file(directory / "model.safetensors") for directory in (self.home.artifact("base", base), last)
        )
        assert any(not torch.equal(after[name], before[name].to(after[name])) for name in after)

    def prefect_rows(self, sql: str) -> list[tuple[Any, ...]]:
        """From Prefect's own database."""
        with sqlite3.connect(self.home.prefect / "prefect.db") as connection:
            return connection.execute(sql).fetchall()

    def clean_up(self) -> None:
        """Ends whatever a failed test left."""
        for process in self.processes():
            process.kill()
        for started in self.started:
            started.kill()
            started.communicate()


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


def finished(process: Started, timeout: float = 240) -> Finished:
    out, err = process.communicate(timeout=timeout)
    return Finished(process.returncode, out, err)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def copy_prefect_database(home: Path, to: Path) -> None:
    """Gives a home the Prefect database of another, whose server is stopped: to make a new one takes seconds."""
    # With its write-ahead log: the database file alone is older than the last commits.
    shutil.copytree(home / "prefect", to / "prefect", ignore=shutil.ignore_patterns("*.json", "*.toml"))
