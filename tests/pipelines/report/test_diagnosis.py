import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from live import SPEC, Lab
from places import ROOT
from recorded_home import START, change_spec, record_experiment, record_run, record_two_cells
from unpacked_home import unpack

from pipelines.home.home import Home
from pipelines.report import diagnosis, write_experiment_report, write_run_report
from pipelines.report.diagnosis import Finding, diagnose
from pipelines.report.evidence import load_run
from rpg.recording.segments import SegmentWriter
from specs.records import EventRow, MetricRow
from storage import Store

STEPS = 30
FROM_HERE = [0.3] * 12 + [0.004] * 18
"""An entropy that collapses at step 13."""


def record_curves(home: Home, run_id: str, **curves: Sequence[float]) -> None:
    """Metrics as the trainer writes them, a value a step; `_of_` stands for the slash."""
    writer = SegmentWriter(home.run(run_id), run_id, 2)
    for name, values in curves.items():
        metric = name.replace("_of_", "/")
        writer.rows([MetricRow(run_id, 2, step, metric, value, START) for step, value in enumerate(values, 1)])
    writer.flush()


def set_keys(home: Home, run_id: str, **sections: Mapping[str, Any]) -> None:
    change_spec(home, run_id, sections)


def found(home: Home, run_id: str) -> list[Finding]:
    with Store.open(home.root) as store:
        return diagnose(store, load_run(home, run_id))


@pytest.mark.more
@pytest.mark.parametrize(
    ("curves", "kind", "step", "sentence", "key"),
    [
        (
            {"kl_of_reverse": [0.01] * 11 + [0.4, 1.5, 2.0] + [2.5] * 16},
            "diverged",
            13,
            "The divergence exploded at step 13: kl/reverse is 1.5 nats a token, after 0.01.",
            "training.optimizer.learning_rate",
        ),
        (
            {"kl_of_reverse": [0.01] * 29 + [float("nan")]},
            "diverged",
            30,
            "The divergence exploded at step 30: kl/reverse is no finite number, after 0.01.",
            "objective.kl_coef",
        ),
        (
            {"entropy": FROM_HERE},
            "entropy_collapsed",
            13,
            "The entropy collapsed at step 13: it is 0.004 nats a token, after 0.3 at step 1. Nothing is explored.",
            "objective.clip.high",
        ),
        (
            {"entropy": [0.004] * STEPS},
            "entropy_collapsed",
            1,
            "The entropy is near 0 from the first step on: 0.004 nats a token. Nothing is explored.",
            "training.entropy_coef",
        ),
        (
            {"zero_std_fraction": [1.0] * STEPS, "reward_of_mean": [0.0] * STEPS},
            "no_signal",
            1,
            "There was nothing to learn from: in 100.0 % of the groups all responses had the same reward (mean 0), so "
            "none was better than another.",
            "training.group_size",
        ),
        (
            {"zero_std_fraction": [0.2] * 15 + [0.95] * 15},
            "no_signal",
            16,
            "There is next to nothing to learn from since step 16: in 95.0 % of the groups all responses have the same "
            "reward.",
            "rollout.dynamic_sampling",
        ),
        (
            {"truncated_fraction": [0.1] * 10 + [0.97] * 20},
            "truncated",
            11,
            "97.0 % of the responses are cut off at 64 tokens since step 11, before their answers are given.",
            "rollout.max_response_length",
        ),
        (
            {"kl_of_rollout": [0.002] * 5 + [0.08] * 25, "rollout_ratio_of_max": [1.1] * 5 + [9.0] * 25},
            "sampler_disagrees",
            6,
            "Sampler and learner disagree since step 6: kl/rollout is 0.08 nats a token, and a token's "
            "ratio reaches 9.",
            "rollout.correction",
        ),
        (
            {f"clip_fraction_of_{side}": [0.0] * STEPS for side in ("low", "high", "dual")}
            | {"ratio_of_max": [1.003] * STEPS},
            "clip_idle",
            1,
            "The clip never acted in 30 steps: no ratio is above 1.003. Without it training would have been the same.",
            "objective.clip.low",
        ),
        (
            {"clip_fraction_of_high": [0.0] * STEPS, "ratio_of_max": [1.0 + 2e-6] * STEPS},
            "still",
            1,
            "The policy hardly moves: in 30 steps no update made a token more than 2e-06 likelier, as a share of its "
            "probability.",
            "training.optimizer.learning_rate",
        ),
    ],
)
def test_a_run_with_a_trouble_is_told_it_with_its_figure_its_step_and_the_keys_to_turn(
    home: Home, curves: dict[str, list[float]], kind: str, step: int, sentence: str, key: str
) -> None:
    run_id = bare_run(home)
    record_curves(home, run_id, **curves)
    (finding,) = found(home, run_id)
    assert (finding.kind, finding.step, finding.sentence) == (kind, step, sentence)
    assert key in finding.remedy


def bare_run(home: Home) -> str:
    """A run of two updates a step whose metrics are still to be recorded."""
    run_id = record_run(home, "sums-s0", steps=0, on_the_way={STEPS: 0.7})
    set_keys(home, run_id, rollout={"max_response_length": 64}, training={"minibatches": 2})
    return run_id


@pytest.mark.more
@pytest.mark.parametrize(
    "curves",
    [
        {"kl_of_reverse": [0.01] * 14 + [3.0] + [0.01] * 15},  # one heavy token
        {"kl_of_reverse": [0.06 + 0.02 * step for step in range(STEPS)]},  # grows, and does not jump
        {"entropy": [0.3] * 27 + [0.01] * 3},
        {"entropy": FROM_HERE, "reward_of_std": [0.5] * 12 + [0.02] * 18, "reward_of_mean": [0.4] * 12 + [0.99] * 18},
        {"truncated_fraction": [0.9] * 10 + [0.1] * 20},
        {"kl_of_rollout": [0.005] * STEPS},
        {"clip_fraction_of_high": [0.0] * 29 + [0.001]},
        {"clip_fraction_of_high": [0.0] * 29 + [0.001], "ratio_of_max": [1.0004] * STEPS},  # of whole responses
        {"clip_fraction_of_high": [0.0] * 9},
        {"ratio_of_max": [1.0] * STEPS, "reward_of_std": [0.0] * STEPS},  # no gradient, whatever the learning rate
        {"zero_std_fraction": [0.2] * 25 + [0.95] * 5},
    ],
)
def test_what_passes_grows_slowly_or_is_solved_is_no_trouble(home: Home, curves: dict[str, list[float]]) -> None:
    run_id = bare_run(home)
    record_curves(home, run_id, **curves)
    assert found(home, run_id) == []


def test_a_clip_on_policy_has_nothing_to_act_on(home: Home) -> None:
    run_id = bare_run(home)
    record_curves(home, run_id, clip_fraction_of_high=[0.0] * STEPS)
    assert [finding.kind for finding in found(home, run_id)] == ["clip_idle"]
    set_keys(home, run_id, training={"minibatches": 1})
    assert found(home, run_id) == []


def test_groups_whose_responses_are_equal_are_no_trouble_where_a_divergence_alone_trains(home: Home) -> None:
    run_id = bare_run(home)
    record_curves(home, run_id, zero_std_fraction=[1.0] * STEPS)
    assert [finding.kind for finding in found(home, run_id)] == ["no_signal"]
    set_keys(home, run_id, reward={"type": "none"})
    assert found(home, run_id) == []


def test_a_reward_that_fails_is_told_first_with_its_last_reason(home: Home) -> None:
    run_id = bare_run(home)
    record_curves(home, run_id, reward_of_error_fraction=[0.0, 0.5], truncated_fraction=[1.0] * STEPS)
    writer = SegmentWriter(home.run(run_id), run_id, 2)
    writer.rows([EventRow(run_id, 2, 2, "reward_failed", "KeyError: 'gold' (reward.py:3)", START)])
    writer.flush()
    assert [finding.kind for finding in found(home, run_id)] == ["reward_failed", "truncated"]
    assert found(home, run_id)[0].sentence == (
        "The reward failed on 25.0 % of the training responses, which count with the least score; the last: "
        "KeyError: 'gold' (reward.py:3)."
    )


@pytest.mark.more
def test_the_page_and_show_say_the_diagnosis_and_an_experiments_page_for_whom_it_holds(
    home: Home, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = record_two_cells(home)
    record_experiment(home, runs)
    for run_id in runs[:2]:
        record_curves(home, run_id, truncated_fraction=[1.0] * 60)
    told = "100.0 % of the responses are cut off at 256 tokens, before their answers are given."
    page = write_run_report(home, runs[0]).read_text()
    assert told in page
    assert page.index(told) < page.index("<figure")
    page = write_experiment_report(home, "sums").read_text()
    assert f"clip.high=0.1 seed 0: {told} Likewise 1 more of 6 runs." in page
    monkeypatch.setenv("RPG_HOME", str(home.root))
    assert f"\nDiagnosis: {told} Raise rollout.max_response_length" in call("show", runs[0])[1]
    assert "Diagnosis" not in call("show", runs[5])[1]
    (finding,) = json.loads(call("show", runs[0], "--json")[1])["diagnosis"]
    assert (finding["kind"], finding["metric"], finding["step"]) == ("truncated", "truncated_fraction", 1)


def test_show_says_a_remedy_that_its_answer_has_once(
    home: Home, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = bare_run(home)
    record_curves(home, run_id, zero_std_fraction=[1.0] * STEPS, reward_of_mean=[0.0] * STEPS)
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = call("show", run_id)[1]
    assert shown.count("There was nothing to learn from") == 1
    assert shown.count("A larger training.group_size or rollout.temperature lets responses differ.") == 1


@pytest.mark.more
def test_healthy_runs_have_no_diagnosis(home: Home, tmp_path: Path) -> None:
    assert [found(home, run_id) for run_id in record_two_cells(home)] == [[]] * 6
    unpack(tmp_path / "earlier")
    earlier = Home(tmp_path / "earlier" / "home")
    runs = sorted(path.name for path in earlier.root.glob("runs/*"))
    kinds = {run_id: [finding.kind for finding in found(earlier, run_id)] for run_id in runs}
    assert kinds == {run_id: ["clip_idle"] if run_id.startswith("stopped") else [] for run_id in runs}
    assert len(runs) == 9


@pytest.mark.long
def test_a_real_run_that_learns_nothing_is_told_why(lab: Lab) -> None:
    fails_on_some = "def score(completions, **columns):\n    return [1 / 0 if completions[0][:1].isalpha() else 0]\n"
    (lab.spec.parent / "reward.py").write_text(fails_on_some)
    spec = SPEC.replace("{type: exact_match}", "{type: python, path: reward.py, function: score}")
    lab.spec.write_text(spec.replace("warm_up: {steps: 5, batch_size: 16}\n", ""))
    ended = lab.rpg("run", str(lab.spec), timeout=500)
    assert ended.code == 0, ended.err
    (run_id,) = [path.name for path in lab.root.glob("runs/*")]
    findings = json.loads(lab.rpg("show", run_id, "--json").out)["diagnosis"]
    assert [finding["kind"] for finding in findings] == ["reward_failed", "no_signal", "truncated"]
    assert re.match(r"The reward failed on \d+\.\d % of the training responses", findings[0]["sentence"])
    assert "at 4 tokens" in findings[2]["sentence"]


def test_the_thresholds_are_those_of_the_page_on_metrics() -> None:
    page = (ROOT / "docs/reading-metrics.md").read_text()
    for said in (
        f"`kl/reverse` above {diagnosis.EXPLODED:g} nats a token from there on, and {diagnosis.JUMP:g} times the "
        f"median of the {diagnosis.LONG} steps before",
        f"`zero_std_fraction` of {diagnosis.NO_SIGNAL:g} over the whole run, or of {diagnosis.SIGNAL_LOST:g} for the "
        f"last {diagnosis.LONG} steps",
        f"`truncated_fraction` of {diagnosis.CUT_OFF:g} for the last {diagnosis.LASTING} steps",
        f"`entropy` below {diagnosis.COLLAPSED:g} nats a token for the last {diagnosis.LASTING} steps",
        f"`kl/rollout` above {diagnosis.APART:g} nats a token for the last {diagnosis.LASTING} steps",
        f"in a run of at least {diagnosis.LONG} steps",
    ):
        assert said in page
    assert diagnosis.MOSTLY == 0.8, "one step in five may be an exception"
