"""A graded reward: the mean score in place of accuracy, with its interval, wherever an accuracy would stand."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from live import SPEC, Lab
from recorded_home import record_experiment, record_run

from pipelines.exchange.account import account_of, render
from pipelines.home.home import Home
from pipelines.planning.weights import most_accurate
from pipelines.report import evidence, write_experiment_report, write_run_report
from pipelines.report.answer import answers_of, outcomes_of
from pipelines.report.compare import compare
from pipelines.running.experiment_page import experiment_markdown
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Reward, Score
from rpg.rewards.functions.weighted_sum import Term, WeightedSum
from rpg.rewards.score import checked
from specs.errors import SpecError
from specs.loader import load_study
from specs.records import Int32, MetricRow
from storage import Store

PACKAGES = Path(__file__).with_name("graded_reward")


@pytest.fixture
def installed() -> Iterator[None]:
    """The package with the graded reward, here and in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGES))
        patch.setenv("PYTHONPATH", str(PACKAGES), prepend=":")
        yield


def record(home: Home, worst: float | None, *, failed: int = 0, mixed: bool = False) -> None:
    """Two cells of three seeds each, the second 3 units better; the last seeds of the second failed."""
    run_ids = [
        record_run(
            home,
            f"sums-{high}-s{seed}",
            seed=seed,
            values={"objective.clip.high": high},
            after=after,
            status="failed" if high > 0.2 and seed >= 3 - failed else "finished",
            graded=None if mixed and high < 0.2 else (worst,),
        )
        for high, after in ((0.1, 0.4), (0.28, 0.7))
        for seed in range(3)
    ]
    record_experiment(home, run_ids)


def answer(home: Home) -> list:
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        return answers_of(home, store, groups, ["sums"])


def test_scores_are_compared_in_their_own_units(home: Home) -> None:
    record(home, worst=None)
    (found,) = answer(home)
    assert found.measure == "score"
    assert re.search(r"by clip.high: 0.28 is best: [67]\.\d+\. It beats 0.1 by \d\.\d+ \[", found.text), found.text
    assert "%" not in found.text
    assert "points" not in found.text
    with Store.open(home.root) as store:
        of_run = dict(store.query("SELECT run_id, avg(score) FROM evaluation_samples WHERE step = 60 GROUP BY 1").rows)
    after = {outcome.label: outcome.after.value for outcome in outcomes_of([found])}
    second = [value for run_id, value in of_run.items() if "0.28" in run_id]
    assert after["0.28"] == pytest.approx(np.mean(second))


@pytest.mark.more
def test_pages_terminal_and_cards_have_the_score(
    home: Home, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    record(home, worst=None)
    page = write_experiment_report(home, "sums").read_text()
    assert "Score on two-terms" in page
    assert "score@8" in page
    assert "gain, points" not in page
    assert "Accuracy on" not in page
    comparison = compare(home, ["sums"])
    assert [outcome.measure for outcome in comparison.outcomes] == ["score", "score"]
    assert comparison.other_measures == ()
    assert "score@8 on two-terms" in experiment_markdown(home, "sums")
    card = render("account.md", account_of(home, "sums-0.28-s0"))
    assert "| set | before training | after step | score | gain |" in card
    assert "%" not in next(line for line in card.splitlines() if line.startswith("| two-terms"))
    for arguments, expected in (
        (["compare", "sums"], "score two-terms"),
        (["runs"], "score 4."),
        (["show", "sums-0.28-s0", "--all"], "score@8"),
        (["sql", "select metric, num_seeds from leaderboard"], "score@8"),
        (["sql", "select metric, is_best from accuracy_curves"], "score@8"),
        (["sql", "select metric, last from last_and_best"], "score@8"),
    ):
        code, out, err = call(*arguments)
        assert code == 0, err
        assert expected in out, arguments


def test_a_failed_seed_counts_with_the_worst_value_that_the_reward_names(home: Home) -> None:
    record(home, worst=-5.0, failed=1)
    (found,) = answer(home)
    assert "lost 1 of its 3 seeds, counted as -5" in found.text
    assert "%" not in found.text


def test_nothing_is_claimed_of_failed_seeds_where_the_reward_names_no_worst_value(home: Home) -> None:
    record(home, worst=None, failed=1)
    (found,) = answer(home)
    assert found.verdict is None
    assert not found.claims
    assert "it lost 1 of its 3 seeds, and the reward declares no worst value with which to count them" in found.text


def test_all_seeds_of_a_cell_may_fail(home: Home) -> None:
    record(home, worst=None, failed=3)
    (found,) = answer(home)
    assert not found.claims


def test_scores_are_not_compared_with_accuracies(home: Home) -> None:
    record(home, worst=0.0, mixed=True)
    assert [(found.measure, len(found.outcomes)) for found in answer(home)] == [("accuracy", 1), ("score", 1)]


def test_the_best_step_is_that_of_the_highest_score(home: Home) -> None:
    run_id = record_run(home, "sums-s0", after=0.5, on_the_way={20: 0.9}, graded=(None,))
    assert most_accurate(home, run_id, [20, 60]) == 20


def test_the_answer_says_how_often_the_reward_failed_and_why(home: Home) -> None:
    run_id = record_run(home, "sums-s0", steps=4)
    writer, why = SegmentWriter(home.run(run_id), run_id, 1), "1 of 8 responses: KeyError: 'x' (mine.py:7)"
    writer.rows([MetricRow(run_id, 1, Int32(3), "reward/error_fraction", 0.125, datetime.now(UTC))])
    writer.event(3, "reward_failed", why)
    writer.flush()
    page = unescape(write_run_report(home, run_id).read_text())
    said = f"The reward failed on 12.5 % of the training responses, which count with the least score; the last: {why}."
    assert said in page
    assert said in compare(home, [run_id]).notes


class Style(Reward):
    """Graded, from -2 on."""

    graded = True
    worst = -2.0

    def score(self, problem: object, response: str) -> None: ...


def test_a_response_that_a_graded_reward_fails_on_is_worth_its_least_value() -> None:
    failed = Score.failed("ValueError: no")
    assert checked(Style(type="style"), failed) == replace(failed, value=-2.0, correct=None)
    assert checked(Reward.model_validate({"type": "exact_match"}), failed) == failed


def test_the_first_term_of_a_sum_says_whether_it_is_graded() -> None:
    style, right = Style(type="style"), Reward.model_validate({"type": "exact_match"})
    graded = WeightedSum(type="weighted_sum", terms=(Term(reward=style, weight=0.5), Term(reward=style, name="b")))
    assert (graded.grades(), graded.worst_value()) == (True, -3.0)
    against = WeightedSum(type="weighted_sum", terms=(Term(reward=style, weight=-1.0),))
    assert (against.grades(), against.worst_value()) == (True, None)
    says = WeightedSum(type="weighted_sum", terms=(Term(reward=right), Term(reward=style)))
    assert says.grades() is False


@pytest.mark.usefixtures("installed")
def test_a_study_of_a_graded_reward_takes_its_score(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    study = spec.with_name("study.yaml")
    text = "name: s\nexperiment: tiny.yaml\ngoal: {{dataset: held_out, metric: {}}}\ntrials: 8\n"
    text += "parameters: {{training.optimizer.learning_rate: {{float: [0.001, 0.1]}}}}\n"
    study.write_text(text.format("mean@2"))
    spec.write_text(SPEC.replace("exact_match", "digits"))
    with pytest.raises(
        SpecError, match=r"reward\.type digits is graded and does not mark answers right or wrong"
    ) as raised:
        load_study(study)
    assert "allowed: score@2" in str(raised.value)
    study.write_text(text.format("score@2"))
    assert load_study(study).targets[0].metric == "score@2"
    spec.write_text(SPEC)
    with pytest.raises(SpecError, match="marks answers right or wrong and is not graded"):
        load_study(study)


@pytest.mark.more
@pytest.mark.usefixtures("installed")
def test_a_run_with_a_graded_reward_is_measured_by_its_score(lab: Lab) -> None:
    lab.spec.write_text(lab.spec.read_text().replace("exact_match", "digits"))
    keeps = "training.checkpoint.keep_best={accuracy_on: held_out}"
    sets = ("evaluation.every_steps=1", keeps, "training.steps=3", "training.checkpoint.every_steps=1")
    ran = lab.rpg("run", str(lab.spec), overrides=sets)
    assert ran.code == 0, ran.err
    assert "Score on held_out" in ran.out
    assert "%" not in ran.out.partition("report")[0].replace("95 %", "")
    rows = lab.query(
        "SELECT metric, step, value, ci_low, ci_high, worst FROM evaluations"
        " WHERE NOT starts_with(metric, 'drift/') ORDER BY step"
    )
    assert {(metric, worst) for metric, *_, worst in rows} == {("score@2", -9.0)}
    assert [step for _, step, *_ in rows] == [0, 1, 2, 3]
    means = dict(lab.query("SELECT step, avg(score) FROM evaluation_samples GROUP BY 1"))
    assert all(low < value < high and value == pytest.approx(means[step]) for _, step, value, low, high, _ in rows)
    assert len({value for _, _, value, *_ in rows}) > 1, "training moved nothing"
    assert lab.query("SELECT DISTINCT correct FROM evaluation_samples") == [(None,)]
    assert lab.query("SELECT DISTINCT correct FROM rollouts") == [(None,)]
    ((step,),) = lab.query("SELECT step FROM accuracy_curves WHERE is_best")
    (run_id,) = lab.run_ids()
    assert (lab.home.run(run_id) / f"weights/step-{step:06}").is_dir()
