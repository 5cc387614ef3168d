"""Bad input as its user meets it: the whole message, exit code 2, nothing trained."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.home.home import Home
from pipelines.planning.plan import make_plan
from pipelines.running.run import RunExecution, register_run
from pipelines.running.stages import perform_stage
from specs.errors import SpecError, render
from specs.loader import load_document
from specs.schema.training import Training
from tests.specs.spec_text import GOOD, changed

VALIDATE = [sys.executable, "-c", "from pipelines.cli import main; main()", "validate", "spec.yaml"]
BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
GYM = "{source: reasoning_gym, task: chain_sum, size: 100}"

FOUND_IN_THE_FILE = {
    "unknown key": (
        changed("low: 0.2", "lo: 0.2"),
        [],
        """\
spec.yaml:18: objective.clip.lo: unknown field
    18 |     lo: 0.2
  allowed: branch, dual, high, keep_divergence, low, type
  hint: did you mean `low`?
1 error; nothing was run
""",
    ),
    "wrong type": (
        changed("steps: 4", "steps: four"),
        [],
        """\
spec.yaml:20: training.steps: must be a whole number
    20 |   steps: four
  given: "four"    allowed: a whole number, at least 1
  hint: Number of steps; each trains on one batch of rollouts.
1 error; nothing was run
""",
    ),
    "out of range": (
        changed("low: 0.2", "low: 1.2"),
        [],
        """\
spec.yaml:18: objective.clip.low: must be less than 1
    18 |     low: 1.2
  given: 1.2    allowed: a number in (0, 1)
  hint: Margin below ratio 1: with a negative advantage a token is clipped below 1 - low.
1 error; nothing was run
""",
    ),
    "missing spec file": (
        None,
        [],
        """\
spec.yaml: no such file
1 error; nothing was run
""",
    ),
    "missing data file": (
        changed(GYM, "{source: jsonl, path: nosuch.jsonl}"),
        [],
        """\
spec.yaml:7: data.train.0.path: no such file
    7 |     - {source: jsonl, path: nosuch.jsonl}
  given: DIR/nosuch.jsonl
1 error; nothing was run
""",
    ),
    "duplicate key": (
        GOOD + "name: again\n",
        [],
        """\
spec.yaml:24: the key `name` is given twice
    24 | name: again
  hint: first given on line 1
1 error; nothing was run
""",
    ),
    "empty file": (
        "",
        [],
        """\
spec.yaml: the file is empty
  hint: `rpg init` writes a spec to start from
1 error; nothing was run
""",
    ),
    "not UTF-8": (
        GOOD.encode() + b"question: caf\xe9\n",
        [],
        """\
spec.yaml:24: not UTF-8 text
  given: byte 0xe9
  hint: save the file as UTF-8
1 error; nothing was run
""",
    ),
    "alias bomb": (
        BOMB,
        [],
        """\
spec.yaml:6: too many values
    6 | f: &f [*e, *e, *e, *e, *e]
  allowed: at most 10000
  hint: aliases count as often as they are used
1 error; nothing was run
""",
    ),
    "missing model directory": (
        changed("source: scratch\n  config: {hidden_size: 32, max_position_embeddings: 64}", "path: ./nosuch"),
        [],
        """\
spec.yaml:2: model.source: missing
    2 | model:
  allowed: pretrained, scratch
  hint: say which source it is
1 error; nothing was run
""",
    ),
    "context too short": (
        changed("max_response_length: 32", "max_response_length: 64"),
        [],
        """\
spec.yaml:11: rollout.max_response_length: prompt and response do not fit the model's context
    11 | rollout: {max_response_length: 64}
  given: 32 + 64 = 96 tokens    allowed: at most 64 tokens together
  hint: lower data.max_prompt_length or rollout.max_response_length, or take a model with a longer context
1 error; nothing was run
""",
    ),
    "--set of an unknown path": (
        GOOD,
        ["--set", "training.stepz=3"],
        f"""\
--set training.stepz=3: training.stepz: unknown field
  allowed: {", ".join(sorted(Training.model_fields))}
  hint: did you mean `steps`?
1 error; nothing was run
""",
    ),
}

LINE_7 = "    7 |     - {source: parquet, path: train.parquet, columns: {prompt: q, answer: a}}\n"
OVERLAP = f"""\
spec.yaml:7: data.train.0: 2 of 3 training problems are in the evaluation sets too
{LINE_7}\
  given: '1 + 1', in `held_out`
  hint: write `data.overlap: drop` to leave them out of training
1 error; nothing was run"""
WHOLE_OVERLAP = """\
spec.yaml:6: data.train: no training problem is left: all 3 are in the evaluation sets too
    6 |   train:
  hint: give training and evaluation sets that differ
1 error; nothing was run"""
MISSING_COLUMN = f"""\
spec.yaml:7: data.train.0.columns.answer: train.parquet has no column `a`
{LINE_7}\
  given: a    allowed: q, answer
  hint: say which column holds the answer: `columns: {{answer: ...}}`
1 error; nothing was run"""
TRUNCATED = f"""\
spec.yaml:7: data.train.0.path: the Parquet file is cut short
{LINE_7}\
  given: DIR/train.parquet (%d bytes)
  hint: copy or download it again
1 error; nothing was run"""
EMPTY = f"""\
spec.yaml:7: data.train.0: the set has no problems
{LINE_7}\
  given: DIR/train.parquet
1 error; nothing was run"""


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("case", FOUND_IN_THE_FILE)
def test_what_the_file_shows_is_told_by_validate(case: str) -> None:
    text, options, expected = FOUND_IN_THE_FILE[case]
    if text is not None:
        Path("spec.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    finished = subprocess.run([*VALIDATE, *options], capture_output=True, text=True, timeout=60)
    assert finished.stderr.replace(str(Path.cwd()), "DIR") == expected
    assert finished.stdout == ""
    assert finished.returncode == 2


def staged(train: str, *overrides: str) -> str:
    """Returns the message of a real run's data stage."""
    Path("spec.yaml").write_text(changed(GYM, train))
    document = load_document("spec.yaml", overrides)
    home = Home(Path("home").absolute())
    plan = make_plan(document, home).runs[0]
    register_run(home, document, plan)
    with pytest.raises(SpecError) as caught:
        perform_stage(RunExecution(document, plan.run_id, home), plan.stage("data"))
    assert not (home.run(plan.run_id) / "checkpoints").exists()
    assert not plan.stage("data").output.exists()
    assert caught.value.done == "this error ended the data stage; no later stage was run"
    return render(caught.value.issues).replace(str(Path.cwd()), "DIR")


def plain(name: str, **columns: list[str]) -> str:
    """A Parquet file, and the source that names it."""
    pq.write_table(pa.table(columns), name)
    return f"{{source: parquet, path: {name}, columns: {{prompt: q, answer: a}}}}"


@pytest.mark.more
@pytest.mark.parametrize(("held_out", "said"), [(["1 + 1", "2 + 2"], OVERLAP), (["1 + 1", "2 + 2", "3 + 3"], None)])
def test_overlapping_train_and_evaluation_data(held_out: list[str], said: str | None) -> None:
    source = plain("train.parquet", q=["1 + 1", "2 + 2", "3 + 3"], a=["2", "4", "6"])
    plain("held_out.parquet", q=held_out, a=["2", "4", "6"][: len(held_out)])
    evaluation = (
        "data.evaluation=[{name: held_out, source: parquet, path: held_out.parquet, columns: {prompt: q, answer: a}}]"
    )
    assert staged(source, evaluation) == (said or WHOLE_OVERLAP)


def test_a_missing_column() -> None:
    assert staged(plain("train.parquet", q=["1 + 1"], answer=["2"])) == MISSING_COLUMN


def test_a_truncated_parquet_file() -> None:
    source = plain("train.parquet", q=["1 + 1"] * 100, a=["2"] * 100)
    Path("train.parquet").write_bytes(Path("train.parquet").read_bytes()[:-20])
    assert staged(source) == TRUNCATED % Path("train.parquet").stat().st_size


def test_an_empty_dataset() -> None:
    pq.write_table(pa.table({"q": pa.array([], pa.string()), "a": pa.array([], pa.string())}), "train.parquet")
    source = "{source: parquet, path: train.parquet, columns: {prompt: q, answer: a}}"
    assert staged(source) == EMPTY
