"""Records a home of earlier versions of the record as `<commit>.tar.xz`, and in it what that version answered.

    python tests/pipelines/earlier_versions/make.py

A version of the record is one set of tables and columns and one way of naming segments. Here are those that a release
wrote and the one before today's, each by its last commit, whose own code trains and evaluates a run of three steps.
Kept are the database, the segments and the documents, and every row of every table and view as that code read them.
What is recorded is never recorded again. Whoever changes a table, a column or a name adds the last commit before the
change, and drops the one before it unless a release wrote it.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COMMITS = ("e32b2b9",)
"""The last commit of each version that a release or the one before today's wrote, the oldest first."""
NEW = {
    "evaluations.worst",
    "rollouts.reward_terms",
    "rollouts.verdicts",
    "evaluation_samples.verdicts",
    "evaluation_samples.turns",
    "trials.posterior_mean",
    "trials.posterior_deviation",
    "trials.chance_of_best",
    "trials.parent",
    "trials.parent_step",
}
"""Columns that the version of today has and the last of these has not, or the other way round."""
SPEC = """\
name: sums
question: Does a home outlive the version that wrote it?
model:
  source: scratch
  model_type: qwen3
  config:
    hidden_size: 8
    intermediate_size: 16
    num_hidden_layers: 1
    num_attention_heads: 2
    num_key_value_heads: 1
    head_dim: 4
    max_position_embeddings: 32
    tie_word_embeddings: true
  tokenizer: {type: bytes}
data:
  train: [{source: jsonl, path: train.jsonl, columns: {answer: answer}}]
  evaluation: [{name: sums, source: jsonl, path: held_out.jsonl, columns: {answer: answer}}]
  prompt: {type: template, template: "{prompt}"}
  max_prompt_length: 16
warm_up: {steps: 5, batch_size: 16, learning_rate: 1.0e-2}
rollout: {engine: transformers, max_response_length: 3}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2, clip: {type: dual}}
training:
  steps: 3
  prompts_per_step: 2
  group_size: 4
  minibatches: 2
  optimizer: {learning_rate: 1.0e-3}
  checkpoint: {every_steps: 2}
evaluation: {samples_per_problem: 2}
"""
RUN = "import sys; from pipelines.cli import main; sys.argv = ['rpg', 'run', 'sums.yaml']; main()"
ANSWER = """\
import json
from pathlib import Path
from storage import Store
from storage.ingest import ingest
ingest(Path("home"))
store = Store.open(Path("home"))
names = [row[0] for row in store.query("show tables").rows]
answers = {name: store.query(f'from "{name}"').table.to_pylist() for name in names}
Path("answers.json").write_text(json.dumps(answers, default=str, indent=1))
"""
KEPT = (
    "experiments.duckdb",
    "experiments/**/*.json",
    "artifacts/**/manifest.json",
    "runs/*/*.json",
    "runs/*/attempts/*",
    "runs/**/segments/*/*.parquet",
    "runs/*/evaluate/*/manifest.json",
)


def main() -> None:
    for commit in COMMITS:
        if not (HERE / f"{commit}.tar.xz").exists():
            with tempfile.TemporaryDirectory() as scratch:
                record(commit, Path(scratch))


def record(commit: str, scratch: Path) -> None:
    """Trains, asks and packs with the code of a commit."""
    code, home = scratch / "code", scratch / "home"
    repository = ["git", "-C", str(HERE)]
    subprocess.run([*repository, "worktree", "add", "--quiet", "--detach", str(code), commit], check=True)
    try:
        write_inputs(scratch)
        environment = os.environ | {"PYTHONPATH": str(code), "RPG_HOME": str(home)}
        for program in (RUN, ANSWER):
            subprocess.run([sys.executable, "-c", program], cwd=scratch, env=environment, check=True)
    finally:
        subprocess.run([*repository, "worktree", "remove", "--force", str(code)], check=True)
    with tarfile.open(HERE / f"{commit}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted({path for pattern in KEPT for path in home.glob(pattern)}):
            archive.add(path, path.relative_to(scratch), filter=nobodys)
        archive.add(scratch / "answers.json", "answers.json", filter=nobodys)


def write_inputs(directory: Path) -> None:
    """The spec, and problems: all sums below ten."""
    (directory / "sums.yaml").write_text(SPEC)
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    for name, held_out in (("train", False), ("held_out", True)):
        chosen = [(a, b) for a, b in pairs if ((a + 2 * b) % 7 == 0) == held_out]
        rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in chosen]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without its owner."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
