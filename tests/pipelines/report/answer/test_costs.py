"""The price of a gain on pages and in comparisons: drift, and sets that are scored by likelihood."""

import json
from collections.abc import Mapping

import numpy as np
import pytest
from recorded_home import FINGERPRINT, record_experiment, record_run
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.report import write_experiment_report
from pipelines.report.answer.costs import drifts, retention
from pipelines.report.compare import compare
from pipelines.studies.measures import score
from rpg.evaluation.drift import DriftSample, drift_measures
from rpg.evaluation.likelihood import ScoredItem, ScoredSet
from rpg.recording.segments import SegmentWriter
from rpg.types import Problem
from specs.records import DriftSampleRow, EvaluationRow, EvaluationScoreRow
from specs.schema.study import Goal
from storage import Store

ARMS: Mapping[str, tuple[float, float, float]] = {"narrow": (0.02, 0.55, 1.9), "wide": (0.2, 0.75, 2.3)}
"""Arm -> nats per token that it drifts, its accuracy, bits per byte after training."""


def record_costs(home: Home, run_id: str, drift: float, bits: float, seed: int) -> None:
    """Drift and bits per byte of a recorded run, about as given; 1.8 bits per byte before training."""
    draw = np.random.default_rng([seed, int(1_000 * drift)])
    writer = SegmentWriter(home.run(run_id) / "evaluate" / FINGERPRINT[:16], run_id, 3)
    for direction, sign in (("reverse", 1), ("forward", -1)):
        for number in range(40):
            tokens = int(draw.integers(4, 12))
            ratio = sign * float(draw.normal(drift * tokens, 0.1 * drift * tokens))
            writer.rows(
                [
                    DriftSampleRow(
                        run_id,
                        FINGERPRINT,
                        60,
                        "two-terms",
                        f"p{number:03}",
                        0,
                        direction,
                        ratio - 9,
                        -9.0,
                        tokens,
                    )
                ]
            )
    for step, level in ((0, 1.8), (60, bits)):
        for number in range(30):
            value = float(draw.normal(level, 0.05))
            size = 100 + number
            writer.rows(
                [
                    EvaluationScoreRow(
                        run_id, FINGERPRINT, step, "prose", "bits_per_byte", f"{number}", value, size, "", None, None
                    )
                ]
            )
    for metric, dataset, value in (("drift/reverse", "two-terms", drift), ("bits_per_byte", "prose", bits)):
        row = EvaluationRow(run_id, FINGERPRINT, 60, dataset, metric, value, value, value, 40, 1)
        writer.rows([row])
    writer.flush()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home, run_ids = Home(tmp_path_factory.mktemp("home")), []
    for clip, (label, (drift, after, bits)) in zip((0.1, 0.28), ARMS.items(), strict=True):
        for seed in range(3):
            values = {"objective.clip.high": clip}
            run_ids.append(record_run(home, f"sums-{label}-s{seed}", seed=seed, values=values, after=after))
            record_costs(home, run_ids[-1], drift, bits, seed)
    record_experiment(home, run_ids)
    return home


def test_drift_and_retention_are_compared_by_the_verdict_and_less_is_better(home: Home) -> None:
    comparison = compare(home, ["sums"])
    by_measure = {(cost.measure, cost.dataset): cost for cost in comparison.costs}
    assert list(by_measure) == [
        ("drift/reverse", "two-terms"),
        ("drift/forward", "two-terms"),
        ("bits_per_byte", "prose"),
    ]
    for cost in comparison.costs:
        assert cost.verdict.best == "0.1", "the arm that drifts less and forgets less"
        assert all(outcome.gain is not None and outcome.gain.known for outcome in cost.outcomes)
    drift = by_measure["drift/reverse", "two-terms"]
    assert drift.text.startswith("Drift/reverse on two-terms at step 60, by clip.high: 0.1 is best: 0.0")
    narrow, wide = drift.outcomes
    assert (narrow.after.value, wide.after.value) == (pytest.approx(0.02, rel=0.05), pytest.approx(0.2, rel=0.05))
    assert narrow.gain.value == pytest.approx(narrow.after.value)
    forgot = by_measure["bits_per_byte", "prose"].outcomes[1].gain
    assert forgot.value == pytest.approx(0.5, abs=0.03)
    assert forgot.low > 0
    # The gain's own conclusion is about accuracy and unchanged.
    assert [answer.dataset for answer in comparison.answers] == ["two-terms"]
    said = json.loads(json.dumps(comparison.to_json(), default=str))
    assert [cost["measure"] for cost in said["costs"]] == [cost.measure for cost in comparison.costs]


def test_compare_and_the_report_show_what_the_gain_cost(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    result = CliRunner().invoke(app, ["compare", "sums"])
    assert result.exit_code == 0, result.output
    assert "Drift/reverse on two-terms at step 60, by clip.high: 0.1 is best" in result.output
    assert "Bits_per_byte on prose at step 60, by clip.high: 0.1 is best" in result.output
    assert "change of bits_per_byte prose" in result.output
    page = write_experiment_report(home, "sums").read_text()
    assert "Drift and retention" in page
    assert "Gain on two-terms over drift/reverse on two-terms" in page
    assert "Gain on two-terms over change of bits_per_byte on prose" in page


def test_the_tables_give_the_values_that_evaluations_record(home: Home) -> None:
    run_id = "sums-wide-s1"
    with Store.open(home.root) as store:
        found, texts = drifts(store, [run_id])[0], retention(store, [run_id])
        rows = store.query("SELECT * FROM drift_samples WHERE run_id = ?", [run_id])
        items = store.query("SELECT * FROM evaluation_scores WHERE run_id = ? AND step = 60", [run_id])
        in_metrics = dict(
            store.query("SELECT name, value FROM metrics WHERE run_id = ? AND name LIKE 'drift/%'", [run_id]).rows
        )
    samples = []
    for row in (dict(zip(rows.columns, each, strict=True)) for each in rows.rows):
        problem = Problem(row["problem_id"], "", "", row["dataset"])
        values = row["direction"], row["num_tokens"], row["logprob"], row["initial_logprob"]
        samples.append(DriftSample(problem, 0, *values))
    for measure in drift_measures(samples, confidence=0.95):
        of_problems = found[measure.metric]["two-terms"][run_id][60].values()
        assert np.mean(list(of_problems)) == pytest.approx(measure.value)
        assert in_metrics[measure.metric] == pytest.approx(measure.value)
    records = [dict(zip(items.columns, each, strict=True)) for each in items.rows]
    scored = tuple(ScoredItem(row["item_id"], row["value"], "", row["num_bytes"]) for row in records)
    whole = ScoredSet("prose", "bits_per_byte", scored).measure(0.95)
    assert np.mean(list(texts["bits_per_byte"]["prose"][run_id][60].values())) == pytest.approx(whole.value)


def test_the_leaderboard_ranks_less_drift_and_fewer_bits_first(home: Home) -> None:
    with Store.open(home.root) as store:
        rows = store.query(
            "SELECT metric, rank, value FROM leaderboard WHERE metric NOT LIKE 'mean@%' ORDER BY ALL"
        ).rows
    values = {metric: [value for name, _, value in rows if name == metric] for metric, _, _ in rows}
    assert set(values) == {"drift/reverse", "bits_per_byte"}
    assert all(found == sorted(found) for found in values.values())
    assert all(len(set(found)) > 1 for found in values.values())


def test_a_study_takes_drift_and_retention_as_goal_and_constraint(home: Home) -> None:
    runs = ["sums-wide-s0", "sums-wide-s1"]
    with Store.open(home.root) as store:
        drift = score(store, home, Goal(metric="drift/reverse", dataset="two-terms", direction="minimize"), runs)
        anywhere = score(store, home, Goal(metric="drift/reverse", direction="minimize"), runs)
        bits = score(store, home, Goal(metric="bits_per_byte", dataset="prose", direction="minimize"), runs)
    assert drift.value == pytest.approx(0.2, rel=0.05)
    assert anywhere.value == pytest.approx(drift.value), "there is one set"
    assert bits.value == pytest.approx(2.3, abs=0.03)
    assert drift.low is not None
    assert drift.low < drift.value
