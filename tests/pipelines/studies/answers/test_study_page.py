"""The page of a study: the answer in words that claim only what fresh seeds confirm, and the charts under it."""

import csv
import html
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import chart_of, charts_of, texts_of
from recorded_home import record_experiment, record_run
from recorded_study import (
    GOAL,
    HIGH,
    KL_GOAL,
    LOW,
    PACE,
    PARAMETERS,
    SCALE,
    arm,
    confirmation,
    confirmed_arm,
    pruned,
    record,
    study,
    trial,
)
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.report.charts import Chart
from pipelines.report.compare import compare
from pipelines.report.plots import Scale, dot_chart, mark, smoothed, surface_chart
from pipelines.report.statistics import Interval
from pipelines.studies.answers.answer import answer, standing
from pipelines.studies.answers.dashboard import study_markdown
from pipelines.studies.answers.importances import importances, num_best
from pipelines.studies.answers.pictures import leaders, surface
from pipelines.studies.answers.report import MOST_TRIALS, results_table, shown_trials, write_study_report
from pipelines.studies.answers.results import StudyRecord, best_of
from specs import SpecError

SEARCH = [trial(0, 0.5), trial(1, 0.6), trial(2, 0.7), trial(3, 0.65)]


def page_of(home: Home, data: dict[str, Any]) -> str:
    return html.unescape(write_study_report(home, record(home, data)).read_text())


def sentence_of(home: Home, data: dict[str, Any]) -> str:
    return answer(home, StudyRecord.of(data)).sentence


@pytest.mark.more
def test_the_name_of_a_study_means_the_study_and_its_trials_wherever_a_name_is_asked_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [confirmed_arm(home, 0, 0.5, [100]), confirmed_arm(home, 2, 0.7, [100])]
    record(home, study(SEARCH[:3], confirmation=confirmation(*arms)))
    trials = [
        record_run(home, f"trial-{number}-s{seed}", seed=seed, experiment="clips", steps=4)
        for number in range(3)
        for seed in range(2)
    ]
    record_experiment(home, trials[-1:], "clips")
    record_run(home, "other", experiment="other", steps=4)
    monkeypatch.setenv("RPG_HOME", str(home.root))
    page = CliRunner().invoke(app, ["report", "clips"]).stdout.strip()
    assert page == str(home.study("clips") / "report.html")
    assert "trial 2" in Path(page).read_text()
    assert [group.label for group in compare(home, ["clips"]).groups] == ["trial 0 (baseline)", "trial 1", "trial 2"]
    listed = json.loads(CliRunner().invoke(app, ["runs", "--experiment", "clips", "--json"]).stdout)
    assert {run["run_id"] for run in listed} == {*trials, "confirm-0-s100", "confirm-2-s100"}


@pytest.mark.more
def test_the_results_of_a_study_are_a_table_for_a_paper(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))

    def told(kind: str) -> str:
        done = CliRunner().invoke(app, ["study", "report", "clips", "--format", kind])
        assert done.exit_code == 0, done.output
        return done.stdout

    record(home, study(SEARCH[:3]))
    rows = list(csv.DictReader(told("csv").splitlines()))
    assert [row["trial"] for row in rows] == ["0 (baseline)", "1", "2"]
    assert {"objective.clip.low", "mean@8 on two-terms, %", "interval"} < rows[0].keys()
    record(
        home, study(SEARCH[:3], confirmation=confirmation(confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.75)))
    )
    baseline, best = json.loads(told("json"))
    assert baseline["against the baseline"] == ""
    assert best["against the baseline"].endswith(" *")
    latex = told("latex")
    assert latex.startswith(
        "\\begin{tabular}{lllll}\n\\toprule\nfresh seeds & mean@8 on two-terms, \\% & interval & against the baseline"
    )
    assert "$^{*}$" in latex
    assert told("markdown").startswith("| fresh seeds | mean@8 on two-terms, % | interval |")


def test_before_confirmation_the_answer_is_a_candidate(home: Home) -> None:
    text = page_of(home, study(SEARCH))
    assert "Candidate: clip.low" in text
    assert "(not confirmed). Its mean@8 on two-terms is 70.0 % [66.0, 74.0]; the best of 4 trials is biased." in text
    assert "rpg study best clips -o clips-best.yaml" in text
    assert "better than" not in text
    assert text.index("Candidate:") < text.index("<figure")


def test_a_baseline_that_nothing_came_out_above_is_a_candidate_too(home: Home) -> None:
    data = study([trial(0, 0.7), trial(1, 0.6)])
    assert sentence_of(home, data).startswith("Candidate: the experiment's own values, which no other trial beat")


def test_nothing_is_said_before_a_trial_has_finished_or_where_none_keeps_the_constraints(home: Home) -> None:
    assert sentence_of(home, study([trial(0, None), pruned(1, 0.4)])) == "No trial has finished yet."
    none_keeps = "No finished trial satisfies the constraints."
    assert sentence_of(home, study([trial(0, 0.5, feasible=False)])) == none_keeps


@pytest.mark.more
def test_a_confirmed_winner_is_claimed_with_its_interval(home: Home) -> None:
    arms = confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.75), confirmed_arm(home, 3, 0.52)
    data = study(SEARCH, confirmation=confirmation(*arms))
    conclusion = answer(home, StudyRecord.of(data))
    claim = r"On 5 fresh seeds, mean@8 on two-terms: Trial 2 is best: 7\d\.\d %\. It beats trial 3, the nearest of the "
    gap = r"other 2, by 2\d\.\d points \[[12]\d\.\d, [23]\d\.\d\]\. Trial 2: clip\.low "
    assert re.match(claim + gap, conclusion.sentence), conclusion.sentence
    assert [result.arm.label for result in conclusion.arms] == ["baseline", "trial 2", "trial 3"]
    assert conclusion.arms[0].against_baseline is None
    assert conclusion.arms[2].against_baseline is not None
    assert not conclusion.arms[2].against_baseline.excludes(0)
    text = page_of(home, data)
    assert "mean@8 on two-terms on fresh seeds" in text
    assert "100, 101, 102, 103, 104" in text


@pytest.mark.more
def test_equal_arms_end_with_no_difference(home: Home) -> None:
    arms = confirmed_arm(home, 0, 0.6), confirmed_arm(home, 2, 0.6)
    text = page_of(home, study(SEARCH, confirmation=confirmation(*arms)))
    assert "The baseline and trial 2 do not differ measurably: " in text
    assert "better than" not in text


def test_a_baseline_that_is_better_than_every_candidate_is_said_to_be(home: Home) -> None:
    arms = confirmed_arm(home, 0, 0.75), confirmed_arm(home, 2, 0.5)
    sentence = sentence_of(home, study(SEARCH, confirmation=confirmation(*arms)))
    assert sentence.startswith("On 5 fresh seeds, mean@8 on two-terms: The baseline is best: 7")
    assert "clip.low" not in sentence


def test_a_goal_to_minimize_is_better_where_it_is_lower(home: Home) -> None:
    goal = KL_GOAL
    values = [0.010, 0.011, 0.010, 0.011, 0.010], [0.005, 0.006, 0.005, 0.006, 0.005], [0.02, 0.021, 0.02, 0.021, 0.02]
    arms = [arm(number, row) for number, row in zip((0, 2, 3), values, strict=True)]
    data = study(SEARCH, goals=[goal], confirmation=confirmation(*arms, dataset=""))
    sentence = sentence_of(home, data)
    assert sentence.startswith("On 5 fresh seeds, kl/reverse: Trial 2 is best: 0.0054. It beats")
    assert "It beats the baseline, the nearest of the other 2, by 0.005 [0.004" in sentence


def test_pass_at_k_is_compared_over_seeds_and_problems(home: Home) -> None:
    arms = confirmed_arm(home, 0, 0.4), confirmed_arm(home, 2, 0.7)
    goal = GOAL | {"metric": "pass@4"}
    conclusion = answer(home, StudyRecord.of(study(SEARCH, goals=[goal], confirmation=confirmation(*arms))))
    assert conclusion.sentence.startswith("On 5 fresh seeds, pass@4 on two-terms: Trial 2 is best: 9")
    assert "points" in conclusion.sentence
    # 1 - (1 - p)^4 is well above p: the values are those of the samples, not the mean@8 of the record.
    assert conclusion.arms[1].mean.value > 0.85


def test_a_confirmation_that_is_not_complete_says_so_and_claims_nothing(home: Home) -> None:
    arms = arm(0, [0.5] * 5), arm(2, [0.9, 0.9, 0.9, None, None])
    text = page_of(home, study(SEARCH, confirmation=confirmation(*arms), status="confirming"))
    assert "The confirmation is not complete: 8 of 10 runs on fresh seeds have ended." in text
    assert "Candidate:" in text
    assert "better than" not in text


def test_runs_of_the_confirmation_that_failed_are_told(home: Home) -> None:
    whole, broken = confirmed_arm(home, 0, 0.6), confirmed_arm(home, 2, 0.6)
    lose(broken, 1)
    note = answer(home, StudyRecord.of(study(SEARCH, confirmation=confirmation(whole, broken)))).note
    assert "1 of 10 runs failed (trial 2: 100); each counts as 0.0 %." in note
    for arm_of in (whole, broken):
        lose(arm_of, 5)
    conclusion = answer(home, StudyRecord.of(study(SEARCH, confirmation=confirmation(whole, broken))))
    assert (
        conclusion.note
        == "The confirmation failed: the baseline or every candidate has fewer than two runs with a value."
    )
    assert conclusion.sentence.startswith("Candidate:")


def test_trials_that_all_came_to_the_same_are_told(home: Home) -> None:
    alike = [{**trial, "values": [0.5], "value": 0.5} for trial in SEARCH]
    assert "trials have exactly the same value: " in answer(home, StudyRecord.of(study(alike))).note
    assert "exactly the same" not in answer(home, StudyRecord.of(study(SEARCH))).note


def lose(arm_of: dict[str, Any], seeds: int) -> None:
    """The first seeds of an arm failed."""
    for unit in arm_of["units"][:seeds]:
        unit |= {"state": "failed", "value": None, "reason": "diverged"}


def test_a_candidate_that_diverged_on_most_fresh_seeds_is_not_better(home: Home) -> None:
    whole, broken = confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.7)
    data = study(SEARCH, confirmation=confirmation(whole, broken))
    assert "Trial 2 is best" in sentence_of(home, data)
    lose(broken, 3)
    data = study(SEARCH, confirmation=confirmation(whole, broken))
    conclusion = answer(home, StudyRecord.of(data))
    assert "is best" not in conclusion.sentence
    assert "Trial 2 lost 3 of its 5 seeds, counted as 0.0 %." in conclusion.sentence
    assert conclusion.arms[1].mean.value < 0.4
    best = best_of(StudyRecord.of(data))
    assert best.baseline
    assert standing(home, StudyRecord.of(data), best) == "no difference"


def test_of_a_training_metric_nothing_is_claimed_where_seeds_failed(home: Home) -> None:
    rows = [0.010, 0.011, 0.010, 0.011, 0.010], [0.001, 0.001, 0.001, 0.001, 0.001], [0.005, 0.006, 0.005, 0.006, 0.005]
    arms = [arm(number, row) for number, row in zip((0, 2, 3), rows, strict=True)]
    lose(arms[1], 2)
    data = study(SEARCH, goals=[KL_GOAL], confirmation=confirmation(*arms, dataset=""))
    conclusion = answer(home, StudyRecord.of(data))
    assert conclusion.sentence.startswith(
        "On 5 fresh seeds, kl/reverse: Trial 3 is best: 0.0054. It beats the baseline by 0.005 ["
    )
    assert "Trial 2 lost 2 of its 5 seeds, and kl/reverse has no worst value" in conclusion.sentence
    assert conclusion.arms[1].against_baseline is None
    best = best_of(StudyRecord.of(data))
    assert best.trial == 3


@pytest.mark.more
def test_a_candidate_that_breaks_a_constraint_on_fresh_seeds_is_neither_best_nor_confirmed(home: Home) -> None:
    arms = confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.75), confirmed_arm(home, 3, 0.52)
    for arm_of, divergence in zip(arms, (0.01, 0.3, 0.02), strict=True):
        for unit in arm_of["units"]:
            unit["constraints"] = {"kl/reverse": divergence}
    bound = {"metric": "kl/reverse", "dataset": "", "max": 0.05, "min": None}
    data = study(SEARCH, constraints=[bound], confirmation=confirmation(*arms))
    conclusion = answer(home, StudyRecord.of(data))
    assert "Trial 2 breaks the constraint kl/reverse at most 0.05: 0.3 on fresh seeds." in conclusion.sentence
    assert "Trial 2 is best" not in conclusion.sentence
    assert not conclusion.arms[1].differs
    best = best_of(StudyRecord.of(data))
    assert best.trial != 2
    assert "breaks kl/reverse at most 0.05: 0.3" in page_of(home, data)
    free = answer(home, StudyRecord.of(data | {"constraints": []}))
    assert "Trial 2 is best" in free.sentence


def test_an_answer_at_fewer_fresh_seeds_makes_the_next_one_more_careful(home: Home) -> None:
    arms = confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.7)
    first = answer(home, StudyRecord.of(study(SEARCH, confirmation=confirmation(*arms))))
    asked = confirmation(*arms) | {"looks": [2, 3, 4], "share": 3}
    later = answer(home, StudyRecord.of(study(SEARCH, confirmation=asked)))
    gaps = [found.arms[1].against_baseline for found in (first, later)]
    widths = [gap.high - gap.low for gap in gaps if gap]
    assert widths[1] > 1.3 * widths[0]
    assert (
        "Earlier interim analyses at 2, 3 and 4 seeds. Brackets of arms are 95 % intervals, of differences 99.71 %."
        in later.note
    )


def test_pruned_trials_stand_apart_with_their_reasons_and_what_they_saved(home: Home) -> None:
    rungs = {"15": {"value": 0.4, "low": 0.3, "high": 0.5}, "30": {"value": 0.45, "low": 0.4, "high": 0.5}}
    finished = [trial(number, 0.5 + number / 100, rungs=rungs) for number in range(4)]
    data = study([*finished, pruned(4, 0.3), pruned(5, 0.2), pruned(6, 0.3, 0.35)])
    text = page_of(home, data | {"pruner": {"type": "asha", "rungs": [15, 30], "eta": 2}})
    assert "pruner asha" in text
    apart = text[text.index(">Pruned and failed</h2>") : text.index(">Value over each parameter</h2>")]
    assert apart.count("<td>pruned at 15</td>") == 2
    assert "<td>below the best half at step 30</td>" in apart
    rows = re.findall(r'<td class="number">(\d+)</td><td class="number">(\d)</td><td class="number">(\d)</td>', text)
    assert rows == [("15", "7", "2"), ("30", "5", "1")]
    assert "Pruning 3 trials saved about 2250 tokens, estimated from the cost of finished trials." in text
    data["trials"][0]["tokens"] = 100_000  # the baseline prepares for all
    assert "Pruning 3 trials saved about 2250 tokens" in page_of(home, data)
    assert "3 pruned" in text
    assert "Pruning 1 trial saved about 750 tokens" in page_of(home, data | {"trials": data["trials"][:5]})


def test_several_goals_have_a_front_and_constraints_a_table(home: Home) -> None:
    def both(number: int, accuracy: float, divergence: float) -> dict[str, Any]:
        kept = {"kl/reverse": divergence}
        return trial(number, accuracy, values=[accuracy, divergence], constraints=kept, feasible=divergence < 0.05)

    trials = [both(0, 0.5, 0.01), both(1, 0.6, 0.03), both(2, 0.55, 0.04), both(3, 0.9, 0.2)]
    bound = {"metric": "kl/reverse", "dataset": "", "max": 0.05, "min": None}
    text = page_of(home, study(trials, goals=[GOAL, KL_GOAL], constraints=[bound]))
    assert "Candidates: trials 1, 0, which no other trial beats in every goal (not confirmed; the best of 4" in text
    assert "rpg study best clips --trial N" in text
    assert "kl/reverse over mean@8 on two-terms" in text
    assert 'at most 0.05</td><td class="number">3 of 4</td>' in text


def test_a_study_that_nobody_ran_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such study"):
        write_study_report(Home(tmp_path), "clips")


def test_conditional_parameters_and_cases_are_drawn_where_a_trial_has_them(home: Home) -> None:
    data = study(SEARCH)
    data["parameters"] = data["parameters"] | {"reference": {"cases": {"pace": {"source": "snapshot"}, "start": {}}}}
    for index, entry in enumerate(data["trials"]):
        entry["params"] = entry["params"] | {"reference": "pace" if index else "start"}
        if not index:
            entry["params"] = {path: value for path, value in entry["params"].items() if path != PACE}
    assert {"start", "not set"} <= parallel_texts(page_of(home, data))


def parallel_texts(text: str) -> set[str]:
    """Returns the texts beside the axes of the chart in parallel coordinates."""
    return set(texts_of(chart_of(text, "All trials, the best strongest")))


def test_a_conditional_parameter_that_no_finished_trial_has_is_drawn_as_not_set(home: Home) -> None:
    data = study(SEARCH)
    data["parameters"] = data["parameters"] | {PACE: {"int": [1, 4], "step": 1, "log": True, "when": {SCALE: "none"}}}
    for entry in data["trials"]:
        entry["params"] = {path: value for path, value in entry["params"].items() if path != PACE}
    assert "not set" in parallel_texts(page_of(home, data))


def noise(number_of_trials: int, seed: int, effect: float = 0.0) -> StudyRecord:
    rng = np.random.default_rng(seed)
    trials = []
    for number in range(1, number_of_trials + 1):
        params = {
            LOW: float(rng.uniform(0.05, 0.5)),
            HIGH: float(0.05 * 20 ** rng.uniform()),
            PACE: int(rng.integers(1, 3)),
            SCALE: str(rng.choice(["none", "group_std"])),
        }
        trials.append(trial(number, float(effect * params[LOW] + rng.normal(0, 0.03)), params=params))
    return StudyRecord.of(study(trials))


@pytest.mark.more
def test_of_pure_noise_no_importance_is_shown() -> None:
    false_alarms = [any(item.above_chance for item in importances(noise(30, seed))) for seed in range(40)]
    assert sum(false_alarms) <= 5  # 2 expected; 6 or more of 40 at 5 % has a chance of 1.4 %


def test_a_parameter_that_decides_is_shown_and_others_are_not() -> None:
    ranked = importances(noise(60, 1, effect=1.0))
    assert [item.path for item in ranked if item.above_chance] == [LOW]
    assert sum(item.share for item in ranked) == pytest.approx(1.0)


@pytest.mark.parametrize("num_trials", [20, 57])
def test_importances_are_those_of_optuna(num_trials: int) -> None:
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    record = noise(num_trials, 3, effect=0.3)
    distributions = {
        LOW: FloatDistribution(0.05, 0.5),
        HIGH: FloatDistribution(0.05, 1.0, log=True),
        PACE: IntDistribution(1, 2),
        SCALE: CategoricalDistribution(["none", "group_std"]),
    }
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    stored = optuna.create_study(direction="maximize")
    for each in record.trials:
        stored.add_trial(optuna.create_trial(params=each.params, distributions=distributions, value=each.value))
    quantile = num_best(num_trials) / num_trials - 1e-9
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
    shares = optuna.importance.get_param_importances(stored, evaluator=evaluator)
    assert {item.path: item.share for item in importances(record)} == pytest.approx(shares)


def test_a_surface_is_the_mean_of_near_trials_and_blank_far_from_all() -> None:
    dots = [mark(0.1, 0.1, "a"), mark(0.1, 0.12, "b"), mark(0.12, 0.1, "c")]
    surface = smoothed(dots, [1.0, 1.0, 1.0], [0.0, 1.0], [0.0, 1.0])
    assert surface[2, 2] == pytest.approx(1.0)
    assert np.isnan(surface[-1, -1])
    drawn = surface_chart(dots, [1.0, 2.0, 3.0], title="t", scales=(Scale(), Scale()))
    (cells,) = drawn.data["cells"]
    assert 0 < len(cells["x"]) < 24 * 24
    assert surface_chart(dots, [1.0, 1.0, 1.0], title="t", scales=(Scale(), Scale())) is None


def test_cells_of_a_surface_are_smaller_where_its_values_are_doubtful() -> None:
    def widths(doubts: list[float]) -> list[float]:
        dots = [mark(0.1, 0.1, "a"), mark(0.5, 0.5, "b"), mark(0.9, 0.9, "c")]
        drawn = surface_chart(dots, [1.0, 2.0, 3.0], title="t", scales=(Scale(), Scale()), doubts=doubts)
        (cells,) = drawn.data["cells"]
        return [right - left for left, right in zip(cells["x"], cells["x2"], strict=True)]

    whole, doubtful = widths([]), widths([0.0, 0.5, 1.0])
    assert max(whole) - min(whole) < 1e-4
    assert min(doubtful) < 0.6 * min(whole)
    assert max(doubtful) == pytest.approx(max(whole), rel=0.01)


def test_the_best_so_far_is_what_the_model_expects_and_not_what_luck_measured(home: Home) -> None:
    expected = {1: 0.55, 2: 0.56, 3: 0.6, 4: 0.58}
    values = {0: 0.5, 1: 0.56, 2: 0.75, 3: 0.62, 4: 0.6}
    trials = [
        trial(number, value, posterior_mean=expected.get(number), posterior_deviation=0.02)
        for number, value in values.items()
    ]
    known = StudyRecord.of(study(trials))
    assert [each.number for each in leaders(known)] == [1, 2, 3]
    unmodelled = StudyRecord.of(study([trial(number, value) for number, value in values.items()]))
    assert [each.number for each in leaders(unmodelled)] == [0, 1, 2]
    text = page_of(home, study(trials))
    assert "is the best so far, at what the model expects of it" in text
    assert "The green line joins the trials that were the best so far." in text
    assert len(chart_of(text, f"{HIGH} over {LOW}")["datasets"]["lines"]) == 1


def test_the_surface_is_the_models_without_a_trial_that_lies_outside_the_ranges() -> None:
    expected = {1: 0.55, 2: 0.56, 3: 0.6}
    trials = [
        trial(number, 0.5 + 0.05 * number, posterior_mean=expected.get(number), posterior_deviation=0.02)
        for number in range(5)
    ]
    within = StudyRecord.of(study(trials[:-1]))
    everything = StudyRecord.of(study(trials))
    assert surface(everything, everything.trials, []) == surface(within, within.trials, [])


def test_a_chart_of_dots_is_none_without_any_and_has_intervals_where_they_are_known() -> None:
    assert dot_chart([], title="t") is None
    drawn = dot_chart([mark(0, 0.5, "a", Interval(0.5, 0.4, 0.6)), mark(1, 0.5, "b")], title="t")
    assert isinstance(drawn, Chart)
    assert [(row["text"], row.get("low"), row.get("high")) for row in drawn.data["marks"]] == [
        ("a", 0.4, 0.6),
        ("b", None, None),
    ]


def many(number_of_trials: int) -> dict[str, Any]:
    """Returns a study of this many trials, a third of them pruned, with the best last but one."""
    rng = np.random.default_rng(0)
    values = 0.5 + 0.1 * rng.normal(size=number_of_trials)
    values[-2] = 1.0
    rungs = {"15": {"value": 0.4, "low": 0.3, "high": 0.5}, "30": {"value": 0.45, "low": 0.4, "high": 0.5}}
    trials = [
        pruned(number, 0.3) if number % 3 == 1 else trial(number, float(value), rungs=rungs)
        for number, value in enumerate(values)
    ]
    trials[-2] = trial(number_of_trials - 2, 1.0)
    return study(trials)


@pytest.mark.more
def test_a_page_of_many_trials_shows_those_that_matter_and_says_so(home: Home) -> None:
    data = many(2000)
    shown = shown_trials(StudyRecord.of(data))
    assert len(shown) <= MOST_TRIALS
    assert {0, 1998} <= {trial.number for trial in shown}
    text = page_of(home, data)
    assert f"{len(shown)} of 2,000 trials" in text
    assert text.count('<td class="number">') > len(shown)
    assert len(text) < 6_000_000


@pytest.mark.long
def test_ten_thousand_trials_are_reported_within_twenty_seconds(home: Home) -> None:
    record(home, many(10_000))
    begun = time.monotonic()
    page = write_study_report(home, "clips")
    assert time.monotonic() - begun < 20
    assert page.stat().st_size < 6_000_000


@pytest.mark.more
def test_an_arm_of_which_all_fresh_seeds_failed_has_an_interval_that_covers(home: Home) -> None:
    whole, broken = confirmed_arm(home, 0, 0.5), confirmed_arm(home, 2, 0.7)
    lose(broken, 5)
    baseline, lost = answer(home, StudyRecord.of(study(SEARCH, confirmation=confirmation(whole, broken)))).arms
    assert baseline.mean.high - baseline.mean.low < 0.3
    assert (lost.mean.value, lost.mean.low) == (0.0, pytest.approx(0.0, abs=1e-6))
    assert lost.mean.high > 0.5, "that five seeds failed does not show that the next one will"


def test_the_headline_of_a_share_is_in_points_as_its_table_is_even_without_scores_by_problem(home: Home) -> None:
    values = [0.50, 0.51, 0.49, 0.50, 0.51], [0.70, 0.71, 0.69, 0.70, 0.71]
    arms = [arm(number, row) for number, row in zip((0, 2), values, strict=True)]
    record = StudyRecord.of(study(SEARCH, confirmation=confirmation(*arms)))
    conclusion = answer(home, record)
    assert "Trial 2 is best: 70.2 %. It beats the baseline by 20.0 points [" in conclusion.sentence
    _, (_, value, _, against, _) = results_table(record, conclusion, 1)[1]
    assert (value, against) == ("70.2", "+20.0 *")


@pytest.mark.parametrize(
    ("path", "searched", "own", "shown"),
    [
        (LOW, {"float": [0.05, 0.5], "step": 0.0, "log": False, "when": {}}, 0.75, "0.75"),
        (HIGH, {"float": [0.05, 1.0], "step": 0.0, "log": True, "when": {}}, 0.0, "0"),
        (SCALE, {"choice": ["group_std", "batch_std"], "when": {}}, "none", "none"),
    ],
    ids=["beyond the ends", "no place on the axis", "none of the choices"],
)
def test_a_baseline_outside_the_range_is_shown_with_its_value(
    home: Home, path: str, searched: dict[str, Any], own: object, shown: str
) -> None:
    trials = [trial(0, 0.5), *(trial(number, 0.5 + number / 100) for number in range(1, 5))]
    for each in trials[1:]:
        each["params"][path] = searched["choice"][0] if "choice" in searched else 0.2
    del trials[0]["params"][path]
    data = study(trials, outside={path: own}, parameters=PARAMETERS | {path: searched})
    record = StudyRecord.of(data)
    columns, rows = results_table(record, answer(home, record))
    assert rows[0][columns.index(path)] == shown
    page = page_of(home, data)
    hover = {text for chart in charts_of(page) for text in texts_of(chart)}
    assert any(f"{path} {shown}" in text for text in hover), "the hover text of its dot has it"
    assert shown in parallel_texts(page), "the axis of the parameter is marked with it"
    assert "not set" not in parallel_texts(page)
    assert f"| {shown} |" in study_markdown(home, record)
