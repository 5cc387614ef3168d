"""A study of a tiny experiment, and what stands in for its training: the value follows from the parameters."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from recorded_home import record_run

from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from pipelines.prefect.flows.experiment import RunOutcome
from pipelines.studies.storage import open_storage
from pipelines.studies.study import run_study
from specs import load_study_document
from specs.document import Document
from specs.schema.experiment import Experiment
from specs.schema.schedule import ValueSchedule

EXPERIMENT = """\
# Can it add?
name: tiny
seeds: [0, 1]
model:
  source: scratch
  model_type: qwen3
  config:
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    head_dim: 16
    max_position_embeddings: 64
    tie_word_embeddings: true
data:
  train:
    - source: reasoning_gym
      task: chain_sum
      config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
      size: 200
      seed: 100000
  evaluation:
    - name: two-terms
      source: reasoning_gym
      task: chain_sum
      config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
      size: 20
      seed: 900000
  prompt: {type: template, template: "{metadata.expression} ="}
  overlap: drop
  max_prompt_length: 16
warm_up: {steps: 20, batch_size: 32, learning_rate: 3e-3}
rollout: {max_response_length: 6}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1e-2, clip: {type: dual, low: 0.2, high: 0.28}}
reference: {source: snapshot, update: {every_steps: 2}}
training:
  steps: 2
  prompts_per_step: 4
  group_size: 4
  minibatches: 2
  checkpoint: {every_steps: 1}
evaluation: {samples_per_problem: 8}
"""
STUDY = """\
# Which clip?
name: clips
question: Which clip?
experiment: tiny.yaml
parameters:
  objective.clip.low: {float: [0.05, 0.5]}
  objective.clip.high: {float: [0.05, 1.0], log: true}
  reference.update.every_steps: {int: [1, 2]}
  advantage.scale: {choice: [none, group_std]}
goal: {dataset: two-terms, metric: mean@8}
sampler: {startup_trials: 3}
trials: 8
"""


def write_study(directory: Path, *changes: tuple[str, str]) -> Path:
    """The two files, the study's with texts replaced. Returns the study's path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tiny.yaml").write_text(EXPERIMENT)
    text = STUDY
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = directory / "study.yaml"
    path.write_text(text)
    return path


def clip_high(experiment: Experiment, step: int) -> float:
    """The upper clip at a step."""
    high: Any = experiment.objective.clip.high  # type: ignore[union-attr]
    return float(high.at(step) if isinstance(high, ValueSchedule) else high)


class Evaluator:
    """Records each run of a trial as trained and evaluated, with the highest accuracy for the widest clip."""

    def __init__(self, home: Home, seconds: float = 0.0, *, steps: int = 2, luck: str = "b") -> None:
        self.home = home
        self.seconds = seconds
        self.steps = steps
        """Returns the runs' training records."""
        self.luck = luck
        """By which the runs' noise is drawn beside clip and seed: not by their ids, which change with the code."""
        self.calls: list[dict[str, Any]] = []
        self.trained: list[str] = []
        """Runs that were not there before."""
        self.steps_trained = 0
        """Counts over all runs; earlier work is not trained again."""

    def accuracy(self, experiment: Experiment, step: int) -> float:
        """After `step` steps of training."""
        return 0.5 + 0.3 * clip_high(experiment, step) * step / self.steps

    def __call__(self, document: Document, until: int = 0) -> tuple[RunOutcome, ...]:
        runs = make_plan(document, self.home).runs
        clip: Any = runs[0].experiment.objective.clip  # type: ignore[union-attr]
        self.calls.append({"low": clip.low, "high": clip.high, "until": until, "seeds": [run.seed for run in runs]})
        time.sleep(self.seconds)
        step = until or self.steps
        for run in runs:
            note = self.home.run(run.run_id) / "trained"
            before = int(note.read_text()) if note.is_file() else 0
            if before < step:
                shutil.rmtree(note.parent, ignore_errors=True)
                after = self.accuracy(run.experiment, step)
                luck = f"{self.luck} {clip_high(run.experiment, step):.6f}"
                settings: Any = {"seed": run.seed, "steps": step, "problems": 20, "experiment": "clips"}
                record_run(self.home, run.run_id, after=after, luck=luck, **settings)
                note.write_text(str(step))
                self.steps_trained += step - before
                if before == 0:
                    self.trained.append(run.run_id)
        return tuple(RunOutcome(run, "paused" if until else "finished") for run in runs)


def load_study(home: Home, name: str) -> optuna.Study:
    """The study as Optuna has it."""
    return optuna.load_study(study_name=name, storage=open_storage(home, name).storage)


def main(arguments: Sequence[str]) -> None:
    """Runs a study in a process of its own: FILE HOME SECONDS."""
    file, root, seconds = arguments
    home = Home(Path(root))
    run_study(
        load_study_document(file), home, Evaluator(home, float(seconds)), say=lambda line: print(line, flush=True)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
