"""Gains where all groups are equally far from the policy before training."""

import json

import pytest
from recorded_home import FINGERPRINT, record_experiment, record_run
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.report import write_experiment_report
from pipelines.report.answer.equal_drift import at_equal_drift
from pipelines.report.compare import compare
from rpg.recording.segments import SegmentWriter
from specs.records import DriftSampleRow, EvaluationRow


def record_drift(home: Home, run_id: str, drift: dict[int, float], problems: int = 60) -> None:
    """Records a drift in nats per token, the same on each problem, at these steps."""
    writer = SegmentWriter(home.run(run_id) / "evaluate" / FINGERPRINT[:16], run_id, 3)
    for step, value in drift.items():
        for number in range(problems):
            row = DriftSampleRow(
                run_id, FINGERPRINT, step, "two-terms", f"p{number:03}", 0, "reverse", 5 * value - 9, -9.0, 5
            )
            writer.rows([row])
        measured = (step, "two-terms", "drift/reverse", value, value, value, problems, 1)
        writer.rows([EvaluationRow(run_id, FINGERPRINT, *measured)])
    writer.flush()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two arms that end at one accuracy: the first has it at half the drift of the second."""
    home, run_ids = Home(tmp_path_factory.mktemp("home")), []
    for clip, label, drift in ((0.1, "cheap", {30: 0.05, 60: 0.1}), (0.28, "dear", {30: 0.1, 60: 0.2})):
        for seed in range(3):
            values = {"objective.clip.high": clip}
            run_ids.append(
                record_run(
                    home, f"sums-{label}-s{seed}", seed=seed, values=values, after=0.75, on_the_way={30: 0.6}, luck="x"
                )
            )
            record_drift(home, run_ids[-1], drift)
    record_experiment(home, run_ids)
    return home


def test_scores_are_interpolated_at_the_largest_drift_that_every_run_reaches() -> None:
    scores = {"a": {0: {"p": 0.0}, 5: {"p": 0.5}, 10: {"p": 1.0}}, "b": {0: {"p": 0.0}, 5: {"p": 0.2}, 10: {"p": 0.6}}}
    drift = {
        "a": {0: {"p": 0.0, "q": 0.0}, 5: {"p": 0.1, "q": 0.3}, 10: {"p": 0.5, "q": 0.7}},
        "b": {0: {"p": 0.0, "q": 0.0}, 5: {"p": 0.4, "q": 0.2}, 10: {"p": 0.2, "q": 0.2}},
    }
    found = at_equal_drift(scores, drift)
    assert found is not None
    level, at_level = found
    assert level == pytest.approx(0.3), "b never drifts more, and ends with less"
    assert at_level["a"][0] == {"p": 0.0}
    assert at_level["a"][10] == {"p": pytest.approx(0.625)}, "a quarter of the way from 0.2 to 0.6 nats"
    assert at_level["b"][10] == {"p": pytest.approx(0.2)}


def test_of_several_places_with_that_drift_the_last_counts() -> None:
    scores = {
        "a": {step: {"p": step / 10} for step in (0, 2, 4, 8, 10)},
        "b": {step: {"p": 0.0} for step in (0, 5, 10)},
    }
    drift = {
        "a": {step: {"p": value} for step, value in ((0, 0.0), (2, 0.5), (4, 0.1), (8, 0.5), (10, 0.6))},
        "b": {0: {"p": 0.0}, 5: {"p": 0.3}, 10: {"p": 0.3}},
    }
    found = at_equal_drift(scores, drift)
    assert found is not None
    level, at_level = found
    assert level == pytest.approx(0.3)
    assert at_level["a"][10] == {"p": pytest.approx(0.6)}, "half-way from step 4 to step 8"
    assert at_level["b"][10] == {"p": 0.0}


@pytest.mark.parametrize(
    "drift",
    [
        {},
        {0: {"p": 0.0}, 10: {"p": 0.5}},
        {5: {"p": 0.1}, 7: {"p": 0.1}, 10: {"p": 0.5}},
        {0: {"p": 0.0}, 5: {"p": 0.0}, 10: {"p": -0.1}},
    ],
    ids=["unmeasured", "once", "not before training", "none"],
)
def test_without_a_path_of_drift_nothing_is_interpolated(drift: dict[int, dict[str, float]]) -> None:
    scores = {"a": {step: {"p": 0.5} for step in (0, 5, 7, 10)}}
    assert at_equal_drift(scores, {"a": drift}) is None


def test_a_comparison_tells_apart_arms_that_end_equal_at_unequal_drift(home: Home) -> None:
    comparison = compare(home, ["sums"])
    assert comparison.answers[0].verdict is not None
    assert comparison.answers[0].verdict.best is None, "they end equally accurate"
    (answer,) = comparison.equal_drift
    assert answer.verdict is not None
    assert answer.verdict.best == "0.1"
    assert answer.text.startswith(
        "On two-terms at drift/reverse 0.1, interpolated with drift taken as known, by clip.high: 0.1 is best"
    )
    cheap, dear = answer.outcomes
    ends = [outcome.after.value for outcome in comparison.outcomes]
    assert cheap.after.value == pytest.approx(ends[0]), "its last evaluation is at this drift"
    assert dear.gain is not None
    assert dear.gain.value == pytest.approx(0.15, abs=0.03), "that of step 30"
    said = json.loads(json.dumps(comparison.to_json(), default=str))
    assert [each["measure"] for each in said["equal_drift"]] == ["accuracy at drift/reverse 0.1"]


def test_the_command_and_the_report_show_gains_at_equal_drift(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    result = CliRunner().invoke(app, ["compare", "sums"])
    assert result.exit_code == 0, result.output
    assert (
        "On two-terms at drift/reverse 0.1, interpolated with drift taken as known, by clip.high: 0.1 is best"
        in result.output
    )
    assert "gain at drift/reverse 0.1 two-terms" in result.output
    as_table = CliRunner().invoke(app, ["compare", "sums", "--format", "csv"]).output
    assert "accuracy at drift/reverse 0.1 two-terms" in as_table
    page = write_experiment_report(home, "sums").read_text()
    assert (
        "On two-terms at drift/reverse 0.1, interpolated with drift taken as known, by clip.high: 0.1 is best" in page
    )
