"""What the first line of a page says: compared at one step, in the verdict's words, with failed seeds at the worst."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from recorded_home import as_it_is, change_spec, record_experiment, record_run, write
from recorded_study import pruned, record, study, trial
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.exchange.account import account_of
from pipelines.home.home import Home
from pipelines.home.versions import looks_of
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.prefect.flows.experiment import Outcomes, RunOutcome, execute_plan
from pipelines.report import evidence, write_experiment_report, write_run_report
from pipelines.report.answer import (
    Answer,
    answers,
    answers_of,
    answers_of_other_measures,
    headline,
    note_looks,
    outcomes_of,
)
from pipelines.report.compare import compare
from pipelines.running.experiment_page import experiment_markdown
from pipelines.web.pages import Pages
from specs.loader import load_document
from storage import Store

SPEC = """\
name: tiny
matrix: {product: {objective.clip.high: [0.2, 0.4]}}
model: {source: scratch, config: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
data:
  train: [{source: reasoning_gym, task: chain_sum, size: 50, seed: 1}]
  evaluation: [{source: reasoning_gym, task: chain_sum, size: 20, seed: 90001, name: held_out}]
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2, clip: {type: dual, low: 0.1, high: 0.2}}
training: {steps: 2, prompts_per_step: 4, group_size: 2, minibatches: 2}
"""


def cells(
    home: Home,
    after: Mapping[float, float],
    seeds: int = 3,
    status: Mapping[tuple[float, int], str] | None = None,
    steps: Mapping[tuple[float, int], int] | None = None,
    **changes: object,
) -> list[str]:
    """A cell for each clip bound, with its accuracy after training; `status` and `steps` of those cut short."""
    run_ids = [
        record_run(
            home,
            f"sums-{high}-s{seed}",
            seed=seed,
            values={"objective.clip.high": high},
            after=to,
            status=(status or {}).get((high, seed), "finished"),
            steps=(steps or {}).get((high, seed), 60),
            **changes,  # type: ignore[arg-type]
        )
        for high, to in after.items()
        for seed in range(seeds)
    ]
    record_experiment(home, run_ids)
    return run_ids


def answer(home: Home, looks: Sequence[int] = ()) -> Answer:
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        evaluated = evidence.accuracies(store, [run_id for group in groups for run_id in group.run_ids])
    (found,) = answers(groups, evaluated, looks=looks)
    return found


@pytest.mark.parametrize("arms", [{0.1: 0.7}, {0.1: 0.5, 0.28: 0.8}], ids=["one setting", "two settings"])
@pytest.mark.parametrize("sources", [1, 2])
def test_a_mixtures_headline_names_every_evaluation_set(home: Home, sources: int, arms: Mapping[float, float]) -> None:
    for run_id in cells(home, arms):
        train = [{"source": "expressions", "seed": 1, "size": 64}] * sources
        change_spec(home, run_id, {"data": {"train": train}})
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        (by_run,) = evidence.accuracies(store, [run_id for group in groups for run_id in group.run_ids]).values()
        found = answers_of(home, store, groups, ["sums"], {"sums": by_run, "functions": by_run})
    said = headline(found)
    assert said.startswith(found[0].text)
    assert "sums" in said
    assert ("functions" in said) is (sources > 1)
    assert {each.num_sets for each in found} == {sources}


def test_what_is_claimed_of_a_mixture_holds_together_over_its_evaluation_sets(home: Home) -> None:
    cells(home, {0.1: 0.5, 0.28: 0.8})
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        (by_run,) = evidence.accuracies(store, [run_id for group in groups for run_id in group.run_ids]).values()
    sets = dict.fromkeys("abcde", by_run)
    together = answers(groups, sets, together=True)[0]
    stricter = answers(groups, sets, confidence=0.99)[0]
    alone = answers(groups, sets)[0]
    gains = [[outcome.gain for outcome in each.outcomes] for each in (together, stricter, alone)]
    assert gains[0] == gains[1]
    assert all(wide.low < narrow.low for wide, narrow in zip(gains[0], gains[2], strict=True) if wide and narrow)
    assert together.verdict is not None
    assert together.verdict == stricter.verdict
    assert [outcome.after for outcome in together.outcomes] == [outcome.after for outcome in alone.outcomes]


def test_a_seed_that_was_stopped_early_does_not_make_its_cell_lose(home: Home) -> None:
    cells(home, {0.1: 0.7, 0.28: 0.7}, status={(0.1, 2): "cancelled"}, steps={(0.1, 2): 20})
    found = answer(home)
    assert found.verdict.differences == ()
    assert found.text.startswith("On two-terms at step 60, by clip.high: ")
    assert "Not counted, as they have not ended: seed 2 of clip.high 0.1 (cancelled)." in found.text
    assert [(outcome.num_seeds, outcome.step) for outcome in found.outcomes] == [(2, 60), (3, 60)]


def test_arms_are_compared_at_the_last_step_that_all_have(home: Home) -> None:
    cells(home, {0.1: 0.5}, on_the_way={20: 0.5})
    wide = [
        record_run(home, f"sums-0.28-s{seed}", seed=seed, values={"objective.clip.high": 0.28}, steps=20, after=0.8)
        for seed in range(3)
    ]
    record_experiment(home, [*(f"sums-0.1-s{seed}" for seed in range(3)), *wide])
    found = answer(home)
    assert found.text.startswith("On two-terms at step 20, by clip.high: 0.28 is best: ")
    assert {outcome.step for outcome in found.outcomes} == {20}


def test_where_arms_share_no_step_nothing_is_claimed(home: Home) -> None:
    cells(home, {0.1: 0.5})
    wide = [
        record_run(home, f"sums-0.28-s{seed}", seed=seed, values={"objective.clip.high": 0.28}, steps=20, after=0.8)
        for seed in range(3)
    ]
    record_experiment(home, [*(f"sums-0.1-s{seed}" for seed in range(3)), *wide])
    found = answer(home)
    assert found.verdict is None
    assert found.text == (
        "On two-terms nothing is compared: they share no step at which all were evaluated"
        " (clip.high 0.1 at step 60, clip.high 0.28 at step 20)."
    )
    assert not any(outcome.differs for outcome in found.outcomes)
    text = write_experiment_report(home, "sums").read_text()
    assert "nothing is compared" in text
    assert 'class="sure' not in text[text.index("against 0.1") : text.index("</table>")].split("</td>")[-2]


def test_trials_that_were_pruned_get_no_star(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [trial(number, 0.7, run_ids=[f"t{number}-s{seed}" for seed in range(3)]) for number in range(2)]
    trials.append(pruned(2, 0.4) | {"run_ids": [f"t2-s{seed}" for seed in range(3)]})
    record(home, study(trials))
    for number, steps, after, status in ((0, 60, 0.7, "finished"), (1, 60, 0.7, "finished"), (2, 20, 0.4, "cancelled")):
        for seed in range(3):
            run_id = f"t{number}-s{seed}"
            record_run(home, run_id, seed=seed, steps=steps, after=after, status=status, experiment="clips")
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", "clips"]).stdout
    assert "] *" not in shown
    assert "Trial 0 (baseline) and trial 1 do not differ measurably" in shown
    assert "seed 0 of trial 2 (cancelled)" in shown
    assert [outcome.against_first for outcome in compare(home, ["clips"]).outcomes][2] is None


@pytest.mark.more
def test_the_headline_names_the_one_that_is_worse_and_the_table_marks_the_same(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells(home, {0.1: 0.6, 0.2: 0.6, 0.3: 0.2})
    found = answer(home)
    assert re.search(
        r"0.[12] and 0.[12] beat 0.3, by 39\.\d \[.*\] and .* points \[.*\]\."
        r" The data do not show which is better\.",
        found.text,
    )
    assert [outcome.differs for outcome in found.outcomes] == [False, False, True]
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", "sums"]).stdout
    assert found.text in shown
    assert shown.count("] *") == 1
    assert found.text in write_experiment_report(home, "sums").read_text()
    assert found.text in account_of(home, "sums-0.1-s0").of_experiment
    assert f"**{found.text}**" in experiment_markdown(home, "sums")
    told = json.loads(CliRunner().invoke(app, ["compare", "sums", "--json"]).stdout)
    assert told["answer"] == found.text
    assert {(row["better"][-3:], row["worse"][-3:]) for row in told["verdicts"][0]["differences"]} == {
        ("0.1", "0.3"),
        ("0.2", "0.3"),
    }


def test_every_star_is_a_difference_of_the_verdict(home: Home) -> None:
    cells(home, {0.1: 0.5, 0.2: 0.5, 0.3: 0.5, 0.4: 0.5})
    groups = evidence.experiment_groups(home, "sums")
    claims = 0
    for repetition in range(20):
        rng = np.random.default_rng(repetition)
        difficulty = rng.normal(0, 0.2, 100)
        made_up = {}
        for group, level in zip(groups, rng.uniform(0.4, 0.7, 4), strict=True):
            for run_id in group.run_ids:
                right = rng.binomial(8, np.clip(level + difficulty + rng.normal(0, 0.01), 0, 1)) / 8
                made_up[run_id] = {60: {str(problem): float(share) for problem, share in enumerate(right)}}
        (found,) = answers(groups, {"d": made_up})
        first, *others = found.outcomes
        claims += found.claims
        told = {frozenset(row[:2]) for row in found.verdict.differences}
        for outcome in others:
            assert outcome.differs == (frozenset((outcome.label, first.label)) in told)
            assert outcome.against_first.excludes(0) == outcome.differs
    assert claims > 5


def test_a_failed_seed_counts_as_zero_and_is_named(home: Home) -> None:
    cells(home, {0.1: 0.5, 0.28: 0.7}, seeds=5, status={(0.28, seed): "failed" for seed in (1, 2, 4)})
    found = answer(home)
    assert found.verdict.best is None
    assert found.verdict.differences == ()
    assert "0.28 lost 3 of its 5 seeds, counted as 0.0 %." in found.text
    assert "Failed: seed 1 of clip.high 0.28, seed 2 of" in found.text
    _, wide = found.outcomes
    assert (wide.num_seeds, wide.num_failed, wide.gain) == (5, 3, None)
    assert wide.after.value == pytest.approx(0.28, abs=0.05)
    text = write_experiment_report(home, "sums").read_text()
    assert "5, 3 failed" in text


def test_a_cell_of_which_all_seeds_failed_is_still_an_arm(home: Home) -> None:
    cells(home, {0.1: 0.6, 0.28: 0.7}, seeds=5, status={(0.28, seed): "failed" for seed in range(5)})
    found = answer(home)
    assert "0.28 lost 5 of its 5 seeds" in found.text
    assert [outcome.num_failed for outcome in found.outcomes] == [0, 5]


def test_a_failed_cell_is_no_arm_on_a_set_that_it_does_not_have(home: Home) -> None:
    """Only the cell on sums was to be measured on sums: there it counts as nothing right."""
    runs = []
    for task, status in (("sums", "finished"), ("sums", "failed"), ("games", "failed")):
        name = f"{task}-{status}-s0"
        sets = [{"source": "expressions", "size": 20, "name": task}]
        values = {"data.evaluation": sets, "training.steps": 60 + len(runs)}
        runs.append(record_run(home, name, seed=0, values=values, status=status))
    record_experiment(home, runs)
    groups = evidence.experiment_groups(home, "sums")
    (found,) = answers(groups, {"sums": {runs[0]: {60: {str(problem): 0.5 for problem in range(20)}}}})
    assert [(outcome.num_failed, outcome.after.value) for outcome in found.outcomes] == [(0, 0.5), (1, 0.0)]


def test_of_one_setting_no_gain_is_claimed_where_seeds_failed(home: Home) -> None:
    cells(home, {0.1: 0.9}, status={(0.1, 1): "failed"})
    found = answer(home)
    assert "1 of 3 seeds failed, counted as 0.0 %: no gain is claimed." in found.text
    assert "rose" not in found.text
    assert "Failed: seed 1." in found.text


def test_what_a_failed_run_came_to_is_on_its_own_page(home: Home) -> None:
    record_run(home, "x-s0", status="failed", before=0.3, after=0.8, steps=20)
    assert re.search(
        r"Accuracy on two-terms rose from .* One seed: the interval covers new problems",
        write_run_report(home, "x-s0").read_text(),
    )


def test_a_tie_at_nothing_is_no_win(home: Home) -> None:
    run_ids = cells(home, {0.1: 0.5, 0.28: 0.5}, seeds=1)
    nothing = {run_id: {60: dict.fromkeys("abcdef", 0.0)} for run_id in run_ids}
    (found,) = answers(evidence.experiment_groups(home, "sums"), {"d": nothing})
    assert found.text.startswith("On d at step 60, by clip.high: All are level at 0.0 %.")
    assert "highest" not in found.text


def test_an_earlier_look_widens_what_is_said(home: Home) -> None:
    cells(home, {0.1: 0.6, 0.28: 0.7}, seeds=4)
    first, later = answer(home), answer(home, looks=(2, 3))
    assert first.verdict is not None
    assert later.verdict is not None
    widths = [
        interval.high - interval.low
        for found in (first, later)
        if found.verdict
        for interval in found.verdict.pairs.values()
    ]
    assert widths[1] > 1.2 * widths[0]
    assert "Third look (earlier at 2 and 3 seeds): brackets of differences are 99.47 % intervals." in later.text
    assert (first.level, later.level) == (0.95, pytest.approx(0.9947, abs=1e-4))


def test_without_an_evaluation_the_headline_says_so() -> None:
    assert headline([]) == "Nothing has been evaluated yet."
    assert outcomes_of([]) == []


@pytest.mark.more
def test_each_number_of_seeds_at_which_rpg_run_answers_is_on_record_and_counts_as_a_look(
    home: Home, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC)
    for seeds in ("[0]", "[0, 1]", "[0, 1, 2]", "[0, 1, 2]"):
        plan = make_plan(load_document(path, (f"seeds={seeds}",)), home)

        def finished(runs: Sequence[RunPlan]) -> Outcomes:
            for run in runs:
                if not (home.run(run.run_id) / "run.json").exists():
                    high = run.values["objective.clip.high"]
                    record_run(home, run.run_id, seed=run.seed, values=run.values, after=0.3 + high, experiment="tiny")
                yield RunOutcome(run, "finished")

        execute_plan(plan, home, finished)
    assert looks_of(home, "tiny") == (2, 3)
    groups = evidence.experiment_groups(home, "tiny")
    with Store.open(home.root) as store:
        (asked,), (plain,) = answers_of(home, store, groups, ["tiny"]), answers_of(home, store, groups, [])
    assert "Second look (first at 2 seeds): brackets of differences are 98.5 % intervals." in asked.text
    assert "look" not in plain.text
    assert asked.text in write_experiment_report(home, "tiny").read_text()
    # Another set of values is another question.
    execute_plan(make_plan(load_document(path, ("training.steps=3",)), home), home, finished)
    assert looks_of(home, "tiny") == ()
    assert looks_of(home, "tiny@1") == (2, 3)


@pytest.fixture
def three_seeds(home: Home) -> Home:
    """Two cells with three seeds each, whose answer has not been shown."""
    cells(home, {0.1: 0.5, 0.28: 0.6})
    path = home.experiment("sums") / "experiment.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"versions": [{"version": 1, "recipes": ["a"], "runs": record["runs"]}]}))
    return home


@pytest.mark.more
@pytest.mark.parametrize("verb", [["report"], ["compare"]])
def test_who_is_shown_an_answer_has_looked(three_seeds: Home, verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(three_seeds.root))
    for _ in range(2):
        assert CliRunner().invoke(app, [*verb, "sums"]).exit_code == 0
    assert looks_of(three_seeds, "sums") == (3,)
    assert "look (" not in CliRunner().invoke(app, ["compare", "sums"]).stdout


def test_a_page_in_a_browser_and_the_page_that_flow_runs_renew_are_looks(three_seeds: Home) -> None:
    pages = Pages(three_seeds)
    pages.report("experiments", "sums")
    pages.close()
    assert looks_of(three_seeds, "sums") == (3,)
    path = three_seeds.experiment("sums") / "experiment.json"
    path.write_text(path.read_text().replace('"looks": [3]', '"looks": []'))
    experiment_markdown(three_seeds, "sums")
    assert looks_of(three_seeds, "sums") == (3,)


@pytest.mark.more
def test_an_answer_while_seeds_are_open_is_a_look_that_a_later_one_pays_for(three_seeds: Home) -> None:
    path = three_seeds.run("sums-0.28-s2") / "state.json"
    ended = path.read_text()
    path.write_text(ended.replace('"finished"', '"cancelled"'))
    note_looks(three_seeds, ["sums"])
    assert looks_of(three_seeds, "sums") == (2.5,)
    assert "look (" not in compare(three_seeds, ["sums"]).answers[0].text
    path.write_text(ended)
    assert "Second look (first at 2 to 3 seeds)" in compare(three_seeds, ["sums"]).answers[0].text


def test_a_look_belongs_to_the_version_that_was_shown_and_no_run_by_itself_is_one(three_seeds: Home) -> None:
    note_looks(three_seeds, ["sums-0.1-s0"])
    assert looks_of(three_seeds, "sums") == ()
    note_looks(three_seeds, ["sums@1"])
    assert looks_of(three_seeds, "sums@1") == (3,)


def test_a_home_that_cannot_be_written_is_read_all_the_same(three_seeds: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Home, "locked", read_only)
    note_looks(three_seeds, ["sums"])
    assert looks_of(three_seeds, "sums") == ()


@pytest.mark.more
def test_problems_that_share_a_passage_make_every_interval_of_a_page_wider(home: Home) -> None:
    cells(home, {0.1: 0.5, 0.28: 0.6})
    clustered = Home(home.root.parent / "clustered")
    cells(clustered, {0.1: 0.5, 0.28: 0.6}, clusters=6)
    widths = []
    for each in (home, clustered):
        groups = evidence.experiment_groups(each, "sums")
        with Store.open(each.root) as store:
            (found,) = answers_of(each, store, groups, [])
            shared = evidence.clusters(store, ["sums-0.1-s0"])
            others = outcomes_of(answers_of_other_measures(store, groups, [found]))
        after, gain, other = found.outcomes[1].after, found.outcomes[1].gain, others[0].after
        assert gain is not None
        intervals = [after, gain, other, *found.verdict.pairs.values()]
        widths.append([interval.high - interval.low for interval in intervals])
    assert set(shared["two-terms"].values()) == {f"passage {number}" for number in range(6)}
    # Six clusters have five degrees of freedom and sixty problems 59, so that even without a common part it is wider.
    assert all(wide > narrow for narrow, wide in zip(*widths, strict=True))


@pytest.mark.more
def test_an_accuracy_by_which_its_checkpoint_was_chosen_is_labelled_wherever_it_is_shown(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(home, "sums-s0", on_the_way={20: 0.9}, after=0.5)
    record_experiment(home, ["sums-s0"])
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["show", "sums-s0", "--all"]).stdout
    (best,) = (line for line in shown.splitlines() if "best" in line)
    assert "best (chosen on these problems: biased upward)" in best
    told = "The accuracy on two-terms is chosen on these problems: biased upward."
    assert told in account_of(home, "sums-s0", step=20).answer
    assert told not in account_of(home, "sums-s0").answer


def test_a_model_that_was_chosen_on_a_set_is_shown_there_and_not_compared(home: Home) -> None:
    record_run(home, "sums-s0", on_the_way={20: 0.9}, after=0.5, experiment="trained")
    weights = home.run("sums-s0") / "weights"
    paths = {"last": str(weights / "step-000060"), "best": str(weights / "step-000020"), "base": "Qwen/Qwen3"}
    for place, (name, path) in enumerate(paths.items()):
        record_run(home, name, before=0.4, steps=0, values={"objective.clip.high": place + 0.1})
        write(home.run(name) / "spec.json", as_it_is(home, name) | {"model": {"source": "pretrained", "path": path}})
    record_experiment(home, list(paths))
    groups = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        (found,) = answers_of(home, store, groups, ["sums"])
    _, best, _ = found.outcomes
    assert [outcome.chosen for outcome in found.outcomes] == [False, True, False]
    assert best.against_first is None
    assert best.label not in {arm.label for arm in found.verdict.arms}
    assert "is not compared (chosen on these problems: biased upward)." in found.text


@pytest.mark.more
def test_further_seeds_of_one_cell_are_a_further_look(three_seeds: Home) -> None:
    for high, to in ((0.1, 0.5), (0.28, 0.6)):
        record_run(three_seeds, f"sums-{high}-s3", seed=3, values={"objective.clip.high": high}, after=to)
    run_ids = [f"sums-{high}-s{seed}" for high in (0.1, 0.28) for seed in range(4)]

    def ended(seeds: Mapping[float, int]) -> Answer:
        kept = [run for run in run_ids if int(run[-1]) < seeds[float(run.split("-")[1])]]
        path = three_seeds.experiment("sums") / "experiment.json"
        version = {"version": 1, "recipes": ["a"], "runs": kept, "looks": list(looks_of(three_seeds, "sums"))}
        record = json.loads(path.read_text()) | {"current": kept, "runs": kept, "versions": [version]}
        path.write_text(json.dumps(record))
        found = compare(three_seeds, ["sums"]).answers[0]
        note_looks(three_seeds, ["sums"])
        return found

    texts = []
    for seeds in ({0.1: 3, 0.28: 3}, {0.1: 3, 0.28: 4}, {0.1: 4, 0.28: 4}):
        texts.append(ended(seeds).text)
    assert looks_of(three_seeds, "sums") == (3, 3.5, 4)
    assert "look (" not in texts[0]
    assert "Second look (first at 3 seeds): brackets of differences are 98.5 % intervals." in texts[1]
    assert "Third look (earlier at 3 and 3 to 4 seeds)" in texts[2]


@pytest.mark.more
def test_the_level_that_a_page_prints_for_brackets_is_the_level_used(home: Home) -> None:
    cells(home, {0.1: 0.5, 0.28: 0.52}, seeds=4)
    path = home.experiment("sums") / "experiment.json"
    record = json.loads(path.read_text())
    version = {"version": 1, "recipes": ["a"], "runs": record["runs"]}
    for looks, printed in (([], ""), ([3], "gains and differences are 98.5 % intervals")):
        path.write_text(json.dumps(record | {"versions": [version | {"looks": looks}]}))
        page = write_experiment_report(home, "sums").read_text()
        assert "Brackets are 95 % intervals for new seeds" in page
        assert printed in page
        assert ("98.5 %" in page) == bool(looks)
    sets = evidence.experiment_groups(home, "sums")
    with Store.open(home.root) as store:
        (by_run,) = evidence.accuracies(store, [run_id for group in sets for run_id in group.run_ids]).values()
    five = answers(sets, dict.fromkeys("abcde", by_run), together=True)[0]
    assert five.level == pytest.approx(0.99)
    assert five.verdict == answers(sets, {"a": by_run}, confidence=0.99)[0].verdict


def test_where_one_seed_stands_apart_the_headline_says_what_was_seen_and_claims_nothing(home: Home) -> None:
    run_ids = cells(home, {0.1: 0.5}, seeds=6)
    rng = np.random.default_rng(0)
    chance = np.clip(0.5 + rng.normal(0, 0.2, 100), 0, 1)
    steady = {run_id: rng.binomial(8, chance) / 8 for run_id in run_ids}
    base = dict(zip(map(str, range(100)), rng.binomial(8, chance * 0.7) / 8, strict=True))

    def told(scores: Mapping[str, np.ndarray]) -> str:
        made_up = {
            run_id: {0: base, 60: dict(zip(base, map(float, row), strict=True))} for run_id, row in scores.items()
        }
        (found,) = answers(evidence.experiment_groups(home, "sums"), {"d": made_up})
        return found.text

    assert told(steady).startswith("Accuracy on d rose from ")
    scope = "That holds for runs that do not collapse; 6 seeds allow for up to 39 % of runs that do."
    assert told(steady).endswith(f"]. {scope}")
    assert scope not in told(dict.fromkeys(run_ids, np.array([*base.values()])))
    apart = told(steady | {run_ids[2]: np.zeros(100)})
    assert re.match(
        r"Accuracy on d moved by \+\d+\.\d to \+\d+\.\d points with 5 seeds and by -3\d\.\d with one, which stands"
        r" apart\. So no gain is claimed\.",
        apart,
    ), apart
    assert "rose" not in apart


def test_an_arm_of_which_all_seeds_failed_has_an_interval_that_covers(home: Home) -> None:
    cells(home, {0.1: 0.6, 0.28: 0.7}, seeds=3, status={(0.28, seed): "failed" for seed in range(3)})
    whole, lost = answer(home).outcomes
    assert (lost.after.value, lost.after.high > 0.5) == (0.0, True)
    assert whole.after.high - whole.after.low < 0.3


@pytest.mark.parametrize(
    ("values", "key", "labels"),
    [
        (
            [{"objective.divergence": "forward"}, {"objective.divergence": "unnormalized_reverse"}],
            "divergence",
            ["forward", "unnormalized_reverse"],
        ),
        ([{"objective.kl_coef": 0.01}, {"objective.kl_coef": 0.1}], "kl_coef", ["0.01", "0.1"]),
        ([{"objective.kl_coef": 0.01}], "kl_coef", ["0.01"]),
        (
            [{"objective.clip": "none", "reference": "average"}, {"objective.clip": "dual", "reference": "initial"}],
            "clip, reference",
            ["none, average", "dual, initial"],
        ),
        (
            [
                {"objective.clip": {"type": "none"}, "training.steps": 9},
                {"objective.clip": {"type": "dual", "low": 0.1, "high": 0.2}, "training.steps": 9},
                {"objective.clip": {"type": "dual", "low": 0.1, "high": 0.4}, "training.steps": 9},
            ],
            "clip.type, clip.low, clip.high",
            ["none", "dual, 0.1, 0.2", "dual, 0.1, 0.4"],
        ),
        ([{"training.steps": 2}, {"rollout.steps": 2}], "", ["training.steps 2", "rollout.steps 2"]),
        ([{"a.x": "one"}, {"a.y": "one"}], "", ["x one", "y one"]),
        (
            [{"a.update": {"plateau": 1}}, {"a.update": {"every_steps": 2}}],
            "",
            ["update.plateau 1", "update.every_steps 2"],
        ),
    ],
)
def test_labels_are_the_values_that_differ_and_their_names_are_the_key(
    values: list[dict[str, object]], key: str, labels: list[str]
) -> None:
    assert evidence.cell_labels(values) == (key, labels)
