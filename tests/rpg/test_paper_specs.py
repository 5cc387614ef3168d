"""The paper's experiments in miniature: their own specs and cells, with a tiny model and one small step."""

import json
import os
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

import specs
from specs.document import Cell, expand
from specs.loader import load_document, load_evaluation
from specs.schema.objective import DualClip, RegularizedObjective, ValueClip
from tests.rpg.tiny_run import make_inputs, rows, train

PAPER = sorted((Path(specs.__file__).parent / "experiments" / "paper").glob("*.yaml"))
MINIATURE = (
    "model={source: pretrained, path: base}",
    "data={train: [{source: parquet, name: train, path: train.parquet}]}",
    "reward.type=exact_match",
    "rollout={engine: transformers, max_response_length: 2048}",
    "resources={}",
    "evaluation={}",
    "seeds=[0]",
    "training.steps=1",
    "training.prompts_per_step=4",
    "training.group_size=8",
    "training.minibatches=2",
    "training.schedule={}",
    "training.precision=float32",
    "training.ranks=1",
    "training.zero_stage=0",
    "training.export_every_steps=0",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    config = AutoConfig.from_pretrained(directory / "base")
    config.max_position_embeddings = 9000
    config.save_pretrained(directory / "base")
    return directory


def cells_of(file: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The experiment's runs, reduced as a user would with --set."""
    monkeypatch.chdir(inputs)
    (inputs / "train.parquet").touch()
    paths = (f"model.path={inputs / 'base'}", f"data.train.0.path={inputs / 'train.parquet'}")
    return expand(load_document(file, (*MINIATURE, *paths)))


def train_cell(cell: Cell, inputs: Path, run: Path) -> None:
    """Trains a step and checks that the policy moved, on groups chosen as the spec says."""
    run.mkdir()
    (run / "spec.json").write_text(cell.experiment.model_dump_json())
    where = {name: os.path.relpath(inputs / name, run) for name in ("data", "base")}
    (run / "inputs.json").write_text(json.dumps({"run_id": run.name, "fingerprint": "f" * 64, **where}))
    train(run)
    metrics = {row["name"]: row["value"] for row in rows(run, "metrics")}
    assert metrics["grad_norm"] > 0, cell.experiment.objective
    assert metrics["skipped_updates"] == 0, "the spec skips what is not finite, and all is"
    assert ("dynamic_sampling/batches" in metrics) == (cell.experiment.rollout.dynamic_sampling is not None)
    assert json.loads((run / "certificate.json").read_text())


def test_every_row_of_the_papers_tables_is_a_cell(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of_tables = {
        "qwen3-4b-8k": 6,  # Table 3
        "qwen3-4b-4k": 8,  # Table 5
        "qwen3-4b-2k": 6,  # Table 6
        "qwen2.5-7b-instruct": 12,  # Table 8
        "qwen3-4b-2k-clip": 6,  # Figure 8: three clips, two divergences
        "qwen3-4b-4k-kl": 6,  # Figure 9: three settings, two estimators
        "qwen3-4b-4k-rate": 8,
        "qwen3-4b-4k-algorithm-1": 2,  # two branches of one divergence
        "qwen3-4b-4k-algorithm-2": 6,  # three clips, two divergences
        "qwen3-4b-8k-headline": 2,  # the divergences of RPG-REINFORCE
        "qwen2.5-7b-instruct-schedule-free": 12,
        "qwen2.5-math-7b": 24,
        "qwen3-4b-2k-fair": 7,
        "qwen3-4b-4k-fair": 7,
        "qwen3-4b-8k-fair": 7,
    }
    assert {file.stem: len(cells_of(file, inputs, monkeypatch)) for file in PAPER} == rows_of_tables


def test_every_departure_is_marked_at_its_line_and_listed_by_the_same_name() -> None:
    marked = {name for file in PAPER for name in re.findall(r"departs \(([^)]+)\):", file.read_text())}
    page = (Path(specs.__file__).parents[1] / "docs" / "paper.md").read_text()
    table = page.partition("## Where these experiments depart")[2]
    listed = re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \|$", table, flags=re.MULTILINE)
    assert len(listed) > 20
    assert marked == set(listed)
    unnamed = [file.name for file in PAPER if re.search(r"departs(?!`| \([^)]+\):)", file.read_text())]
    assert not unnamed, "a mark without a name is in no list"


def test_the_readings_of_the_paper_that_no_table_has_are_cells_of_their_own(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objectives(stem: str) -> list[RegularizedObjective]:
        (file,) = [file for file in PAPER if file.stem == stem]
        found = [cell.experiment.objective for cell in cells_of(file, inputs, monkeypatch)]
        return [objective for objective in found if isinstance(objective, RegularizedObjective)]

    first = [(item.estimator, item.divergence, item.clip) for item in objectives("qwen3-4b-4k-algorithm-1")]
    settings = {"low": 0.2, "high": 0.28, "dual": 10}
    assert first == [
        ("differentiable", "unnormalized_reverse", DualClip(branch=branch, **settings))
        for branch in ("raw", "regularized")
    ]
    second = {item.clip for item in objectives("qwen3-4b-4k-algorithm-2")}
    assert second == {DualClip(**settings), DualClip(branch="regularized", **settings), ValueClip(**settings)}


def test_the_headline_of_the_abstract_stands_beside_what_is_measured() -> None:
    (file,) = [file for file in PAPER if file.stem == "qwen3-4b-8k-headline"]
    trained = load_document(file).experiment
    assert trained.rollout.max_response_length == 8192
    (table,) = trained.evaluation.literature
    assert table.datasets == ("aime-2025",)
    assert table.rows["RPG-REINFORCE-URKL"] == [[0.5073, 0.5208]]
    (cell,) = expand(load_evaluation(file.parents[2] / "evaluations" / "qwen3-4b-official.yaml"))
    measured = cell.experiment.evaluation
    assert measured.max_response_length == 8192
    assert measured.literature[0].rows == {"Qwen3-4B-Instruct": [[0.47, 0.47]]}
    assert cell.label.startswith("Qwen3-4B-Instruct")


@pytest.mark.parametrize("file", [file for file in PAPER if file.stem.endswith("-fair")], ids=lambda file: file.stem)
def test_the_fair_comparison_varies_the_objective_alone(
    file: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell.experiment for cell in cells_of(file, inputs, monkeypatch)]
    for section in ("data", "rollout", "reward", "training", "advantage"):
        assert len({getattr(cell, section).model_dump_json() for cell in cells}) == 1, section


@pytest.mark.more
def test_a_row_trains(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_cell(cells_of(PAPER[0], inputs, monkeypatch)[-1], inputs, tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("file", PAPER, ids=lambda file: file.stem)
def test_every_row_trains(file: Path, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cell in enumerate(cells_of(file, inputs, monkeypatch)):
        train_cell(cell, inputs, tmp_path / f"run-{number}")
