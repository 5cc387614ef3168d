import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from recorded_home import START, as_it_is, change_spec, record_experiment, record_run, record_two_cells, write
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.home.runs import NoSuchRunError
from pipelines.report import write_experiment_report
from pipelines.report.compare import compare
from pipelines.report.statistics import THESE_WEIGHTS, mean_interval, spread_of, verdict
from rpg.recording.segments import SegmentWriter
from specs.errors import SpecError
from specs.records import MetricRow
from storage import Store


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    record_two_cells(home)
    return home


@pytest.mark.more
def test_an_experiments_cells_are_groups_of_seeds(home: Home) -> None:
    comparison = compare(home, ["sums"])
    assert [group.label for group in comparison.groups] == ["0.1", "0.28"]
    assert [len(group.runs) for group in comparison.groups] == [3, 3]
    assert comparison.spec == {"objective.clip.high": [0.1, 0.28]}
    reward = [measure for measure in comparison.measures if measure.metric == "reward/mean"]
    assert reward[0].against_first is None
    assert reward[1].against_first is not None
    assert reward[1].against_first.excludes(0)
    assert reward[1].against_first.value == pytest.approx(reward[1].value.value - reward[0].value.value)


@pytest.mark.more
def test_a_metric_that_is_everywhere_the_same_shows_no_difference(home: Home) -> None:
    rates = [measure for measure in compare(home, ["sums"]).measures if measure.metric == "learning_rate"]
    assert [measure.against_first for measure in rates] == [None, None]


def record_metrics(home: Home, run_id: str, **values: float) -> None:
    """Ten further steps with these values throughout; `kl__behaviour` is kl/behaviour."""
    writer = SegmentWriter(home.run(run_id), run_id, 1)
    names = {name.replace("__", "/"): value for name, value in values.items()}
    writer.rows([MetricRow(run_id, 1, step, name, names[name], START) for step in range(61, 71) for name in names])
    writer.flush()


@pytest.mark.more
def test_groups_without_a_signal_are_told_with_what_to_change_instead_of_that_no_cell_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    silent, other = (
        [
            record_run(home, f"sums-{high}-s{seed}", seed=seed, values={"objective.clip.high": high}, after=0.46)
            for seed in range(2)
        ]
        for high in (0.1, 0.28)
    )
    record_experiment(home, [*silent, *other])
    for run_id in silent:
        record_metrics(home, run_id, zero_std_fraction=0.995)
    monkeypatch.setenv("RPG_HOME", str(home.root))
    told = "There was nothing to learn from in clip.high 0.1: in 99.5 % of the groups all responses had"
    assert told in CliRunner().invoke(app, ["compare", "sums"]).stdout
    page = write_experiment_report(home, "sums").read_text()
    assert told in page
    assert "do not differ measurably" in page
    for run_id in other:
        record_metrics(home, run_id, zero_std_fraction=1.0)
    page = write_experiment_report(home, "sums").read_text()
    assert "There was nothing to learn from: in 99.5 % of the groups" in page
    assert "use easier problems, a warm_up" in page
    assert "differ measurably" not in page


@pytest.mark.more
def test_a_baseline_over_the_batch_learns_from_groups_of_equal_rewards(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run_id = record_run(home, "sums-s0")
    record_metrics(home, run_id, zero_std_fraction=1.0)
    assert len(compare(home, [run_id]).notes) == 1
    change_spec(home, run_id, {"advantage": {"baseline": "batch_mean"}})
    assert compare(home, [run_id]).notes == ()


@pytest.mark.more
def test_runs_that_are_missing_are_counted_and_states_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    runs = [
        record_run(home, f"sums-s{seed}", seed=seed, status=status)
        for seed, status in enumerate(("finished", "cancelled", "finished"))
    ]
    record_experiment(home, [*runs, "sums-s3"])  # one that was never begun
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", "sums"]).stdout
    assert re.search(r"states +2 finished, 1 cancelled", shown)
    assert "sums: 2 of 4 runs; incomplete." in shown
    (group,) = json.loads(CliRunner().invoke(app, ["compare", "sums", "--json"]).stdout)["groups"]
    assert group["states"] == ["finished", "cancelled", "finished"]
    assert "2 of 4 runs; incomplete." in write_experiment_report(home, "sums").read_text()
    record_experiment(home, [runs[0]])
    assert "incomplete" not in write_experiment_report(home, "sums").read_text()


@pytest.mark.more
def test_from_fewer_than_four_seeds_a_metric_shows_the_seeds_and_from_more_no_interval_leaves_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    for count in (3, 4):
        runs = [record_run(home, f"{count}-s{seed}", seed=seed, experiment=f"sums{count}") for seed in range(count)]
        for run_id, value in zip(runs, (0.001, 0.002, 0.3, 0.001), strict=False):
            record_metrics(home, run_id, ratio__ess=1 - value / 10, kl__behaviour=value)
        record_experiment(home, runs, f"sums{count}")
    few, more = ({measure.metric: measure for measure in compare(home, [f"sums{count}"]).measures} for count in (3, 4))
    assert few["kl/behaviour"].seeds == pytest.approx((0.001, 0.002, 0.3))
    assert not any(measure.value.known for measure in few.values())
    assert more["kl/behaviour"].value.low == 0 < more["kl/behaviour"].value.high
    assert more["ratio/ess"].value.high == 1
    monkeypatch.setenv("RPG_HOME", str(home.root))
    assert "0.101 (0.001, 0.002, 0.3)" in CliRunner().invoke(app, ["compare", "sums3", "--all"]).stdout


def test_single_runs_are_compared_by_problem_and_have_no_seed_interval(home: Home) -> None:
    comparison = compare(home, ["sums-narrow-s0", "sums-wide-s0"])
    assert comparison.outcomes[1].against_first is not None
    assert all(measure.value.low != measure.value.low for measure in comparison.measures)


@pytest.mark.more
def test_a_comparison_fits_on_one_screen_and_all_of_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    names = [record_run(home, f"sums-s{seed}", seed=seed) for seed in range(2)]
    change_spec(home, names[1], {"model": {"config": {f"key{place}": place for place in range(20)}}})
    record_metrics(home, names[0], truncated_fraction=1.0)
    monkeypatch.setenv("RPG_HOME", str(home.root))
    short = CliRunner().invoke(app, ["compare", *names]).stdout
    assert len(short.splitlines()) <= 34
    assert short.startswith("On two-terms at step 60: ")
    assert "Diagnosis: seed 0: 100.0 % of the responses are cut off" in short
    assert re.search(r"next\n  rpg compare sums-s0 sums-s1 --all  \d+ more rows\n$", short)
    whole = CliRunner().invoke(app, ["compare", *names, "--all"]).stdout
    for only in ("model.config.key19", "pass@8 two-terms", "learning_rate"):
        assert only in whole
        assert only not in short


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_the_table_for_a_paper_compiles(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    table = CliRunner().invoke(app, ["compare", "sums", "--format", "latex"]).stdout
    assert "$^{*}$" in table
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{table}\end{{document}}"
    (tmp_path / "table.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "table.pdf").stat().st_size > 1000


def test_a_paper_has_differences_and_intervals_in_columns_of_their_own(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))

    def rows(*options: str) -> list[list[str]]:
        done = CliRunner().invoke(app, ["compare", "sums", "--format", "csv", "--rows", "accuracy", *options])
        return list(csv.reader(done.stdout.splitlines()))

    columns, first, second = rows("--digits", "2")
    assert columns == ["result", "group", "value", "interval", "difference", "its interval"]
    outcome = compare(home, ["sums"]).outcomes[1]
    assert first[4:] == ["", ""]
    assert second[0] == "accuracy two-terms, %"
    assert second[2:] == [
        f"{100 * outcome.after.value:.2f}",
        f"[{100 * outcome.after.low:.2f}, {100 * outcome.after.high:.2f}]",
        f"{100 * outcome.against_first.value:+.2f} *",
        f"[{100 * outcome.against_first.low:+.2f}, {100 * outcome.against_first.high:+.2f}]",
    ]
    # Without a number, half the narrowest interval has two digits: about 5 points.
    assert re.fullmatch(r"\d\d\.\d", rows()[2][2])
    latex = CliRunner().invoke(app, ["report", "sums", "--format", "latex"]).stdout
    assert "result & clip.high & value" in latex
    assert r"\caption{Means over 3 seeds and 60 problems, with 95 \% intervals." in latex


def test_brackets_in_values_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    names = [
        record_run(home, f"sums-{number}", values={"model.config.note": kind})
        for number, kind in enumerate(("[red]rpg[/red]", "[/]grpo", "\\[a]"))
    ]
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", *names])
    assert shown.exit_code == 0, shown.output
    for kind in ("[red]rpg[/red]", "[/]grpo", "\\[a]"):
        assert kind in shown.stdout


@pytest.mark.more
def test_one_seed_a_group_marks_no_difference_and_says_that_it_cannot_tell(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["sums-narrow-s0", "sums-wide-s0"]
    outcomes = compare(home, names).outcomes
    assert {outcome.after.holds_for for outcome in outcomes} == {THESE_WEIGHTS}
    against = outcomes[1].against_first
    assert against.excludes(0)  # wide is 16 points better
    assert not against.tells_from(0)
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", *names]).stdout
    assert "One seed each: the intervals cover new problems, not new training runs." in shown
    assert "] *" not in shown
    several = CliRunner().invoke(app, ["compare", "sums"]).stdout
    assert "One seed" not in several
    assert several.count("] *") == 1
    assert "On two-terms at step 60, by clip.high: 0.28 is best: " in several


@pytest.mark.more
def test_pass_and_majority_have_the_intervals_of_their_scores_by_seed_and_problem(home: Home) -> None:
    comparison = compare(home, ["sums"])
    measures = [f"{name}@{k}" for name in ("pass", "maj") for k in (2, 4, 8)]
    assert [(outcome.measure, outcome.label) for outcome in comparison.other_measures] == [
        (measure, group.label) for measure in measures for group in comparison.groups
    ]
    with Store.open(home.root) as store:
        rows = store.query(
            "SELECT run_id, problem_id, count_if(correct) FROM evaluation_samples "
            "WHERE step = 60 GROUP BY ALL ORDER BY ALL"
        ).rows
    right = np.array([count for _, _, count in rows]).reshape(2, 3, 60)  # clips, seeds, problems
    scores = 1 - (8 - right) * (7 - right) / (8 * 7)
    narrow, wide = comparison.other_measures[:2]
    expected = mean_interval(scores[0], spread=spread_of(list(scores)))
    assert (narrow.after.low, narrow.after.high) == pytest.approx((expected.low, expected.high))
    difference = verdict({"narrow": scores[0], "wide": scores[1]}).over("wide", "narrow")
    assert (wide.against_first.low, wide.against_first.high) == pytest.approx((difference.low, difference.high))
    assert narrow.gain.known


def test_what_was_measured_with_fewer_samples_has_no_part_in_the_measures_of_several(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    numbers = {"greedy": 1, "two": 2, "sampled": 8}
    for name, samples in numbers.items():
        record_run(home, name, values={"evaluation.samples_per_problem": samples}, samples=samples)
    comparison = compare(home, [*numbers])
    assert len(comparison.outcomes) == 3
    labels: dict[str, int] = {}
    for outcome in comparison.other_measures:
        labels[outcome.measure] = labels.get(outcome.measure, 0) + 1
        assert outcome.against_first is None, "the first column has no such measure"
    assert labels == {"pass@2": 2, "maj@2": 2, "pass@4": 1, "maj@4": 1, "pass@8": 1, "maj@8": 1}


def test_a_length_that_evaluation_says_itself_is_what_evaluations_differ_in(tmp_path: Path) -> None:
    home = Home(tmp_path)
    length = "rollout.max_response_length"
    record_run(home, "trained", values={length: 16, "evaluation.max_response_length": 32, "rollout.temperature": 0.7})
    for name, values in {"same": {length: 32}, "longer": {length: 64}}.items():
        as_it_is(home, record_run(home, name, values=values))
    trained = {"objective.type": ["rpg", None], "training.steps": [60, None]}
    assert compare(home, ["trained", "same"]).spec == trained
    assert compare(home, ["trained", "longer"]).spec == trained | {"evaluation.max_response_length": [32, 64]}


def test_a_run_whose_spec_the_schema_does_not_take_is_refused_by_its_name_and_left_out_of_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of another version is no default: the run says which key, and its experiment that the run is left out."""
    home = Home(tmp_path)
    record_two_cells(home)
    spec = change_spec(home, "sums-wide-s2", {"evaluation": {"confidense": 0.5}})
    monkeypatch.setenv("RPG_HOME", str(home.root))
    place = "runs/sums-wide-s2/spec.json: evaluation.confidense: unknown field"
    for command in (["show"], ["compare"], ["report"], ["export", str(tmp_path / "out")]):
        verb, *rest = command
        refused = CliRunner().invoke(app, [verb, "sums-wide-s2", *rest])
        assert isinstance(refused.exception, SpecError), refused.output
        assert place in str(refused.exception)
    comparison = compare(home, ["sums"])
    assert "sums-wide-s2" not in [run.run_id for group in comparison.groups for run in group.runs]
    said = "sums-wide-s2 is left out, as its spec cannot be read: evaluation.confidense: unknown field."
    assert any(said in note for note in comparison.notes)
    assert said in write_experiment_report(home, "sums").read_text()
    shown = CliRunner().invoke(app, ["runs"])
    assert shown.exit_code == 0, "a list is not stopped by one run"
    del spec["evaluation"]["confidense"]
    write(home.run("sums-wide-s2") / "spec.json", spec)
    assert CliRunner().invoke(app, ["show", "sums-wide-s2"]).exit_code == 0


@pytest.mark.more
def test_the_level_of_the_spec_is_that_of_every_interval(tmp_path: Path) -> None:
    widths = {}
    for level in (0.5, 0.95):
        home = Home(tmp_path / str(level))
        for run_id in record_two_cells(home):
            change_spec(home, run_id, {"evaluation": {"confidence": level}})
        comparison = compare(home, ["sums"])
        intervals = []
        for outcome in (*comparison.outcomes, *comparison.other_measures):
            intervals += [outcome.after, outcome.before, outcome.gain, outcome.against_first]
        for metric in comparison.measures:
            intervals += [metric.value, metric.against_first]
        widths[level] = [interval.high - interval.low for interval in intervals if interval and interval.known]
    pairs = list(zip(widths[0.5], widths[0.95], strict=True))
    assert len(pairs) > 50
    assert all(narrow < wide or narrow == wide == 0 for narrow, wide in pairs)


def labels(home: Home, *names: str) -> tuple[str, list[str]]:
    groups = compare(home, names).groups
    assert len({group.key for group in groups}) == 1
    return groups[0].key, [group.label for group in groups]


def test_labels_of_several_names_show_what_differs(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name, highs in (("sums", (0.1, 0.28)), ("more", (0.1, 0.28)), ("one", (0.1,))):
        runs = [
            record_run(home, f"{name}-{high}-s0", values={"objective.clip.high": high}, experiment=name)
            for high in highs
        ]
        record_experiment(home, runs, name)
    record_run(home, "sums-0.1-s1", seed=1, values={"objective.clip.high": 0.1})
    assert labels(home, "sums") == ("clip.high", ["0.1", "0.28"])
    assert labels(home, "sums", "more") == ("clip.high", ["sums: 0.1", "sums: 0.28", "more: 0.1", "more: 0.28"])
    assert labels(home, "sums", "one") == ("", ["sums: clip.high 0.1", "sums: clip.high 0.28", "one"])
    assert labels(home, "sums-0.1-s0", "sums-0.28-s0") == ("clip.high", ["0.1", "0.28"])
    assert labels(home, "sums-0.1-s0", "sums-0.1-s1") == ("", ["seed 0", "seed 1"])
    assert labels(home, "sums-0.1-s0", "more-0.1-s0") == ("", ["sums", "more"])
    shown = compare(home, ["sums", "more"]).groups[1].named
    assert shown == "sums: clip.high 0.28"


def test_an_unknown_name_is_a_users_error(home: Home) -> None:
    with pytest.raises(NoSuchRunError, match="no run `nothing`"):
        compare(home, ["nothing"])


@pytest.mark.more
def test_the_verbs_print_tables_json_and_where_the_page_lies(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", "sums"]).stdout
    assert "objective.clip.high   0.1" in shown
    assert "accuracy two-terms" in shown
    plain = json.loads(CliRunner().invoke(app, ["compare", "sums-wide-s0", "sums-wide-s1", "--json"]).stdout)
    assert plain["spec"] == {}
    assert plain["metrics"][0]["value"]["low"] is None
    assert [group["seeds"] for group in plain["groups"]] == [[0], [1]]
    page = CliRunner().invoke(app, ["report", "sums", "-o", str(home.root / "page.html")]).stdout.strip()
    assert page == str(home.root / "page.html")
    assert "is best" in Path(page).read_text()


@pytest.mark.more
def test_groups_that_were_evaluated_at_other_steps_are_shown_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    for name, steps in (("whole", 60), ("paused", 30)):
        record_experiment(home, [record_run(home, f"{name}-s0", steps=steps, experiment=name)], name)
    monkeypatch.setenv("RPG_HOME", str(tmp_path))
    shown = CliRunner().invoke(app, ["compare", "whole", "paused"]).stdout
    (row,) = (line.split() for line in shown.splitlines() if "evaluated at step" in line)
    assert row[-2:] == ["60", "30"]
    assert "evaluated at step" not in CliRunner().invoke(app, ["compare", "whole", "whole-s0"]).stdout


@pytest.mark.more
def test_the_accuracies_that_others_report_stand_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, labels = Home(tmp_path), {}
    theirs = {"RPG": [[0.4458, 0.4531]], "DAPO": [[0.4063, 0.4479]]}
    table = {"source": "A paper, Table 5", "measure": "mean@32", "datasets": ["two-terms"], "rows": theirs}
    for cell, label, levels in (
        (0.1, "RPG, training.steps 60", {20: 0.9, 40: 0.3}),
        (0.28, "DAPO", {20: 0.5}),
        (0.3, "RPG-REINFORCE", {}),  # no row is called so, though one begins as it does
    ):
        for seed in range(2):
            values = {"objective.clip.high": cell}
            run_id = record_run(home, f"sums-{cell}-s{seed}", seed=seed, values=values, after=0.7, on_the_way=levels)
            tables = [{**table, "remarks": "A misprint." if label == "DAPO" else ""}]
            change_spec(home, run_id, {"evaluation": {"literature": tables}})
            labels[run_id] = label
    record_experiment(home, list(labels))
    record = home.experiment("sums") / "experiment.json"
    write(record, json.loads(record.read_text()) | {"labels": labels})

    comparison = compare(home, ["sums"])
    assert list(comparison.spec) == ["objective.clip.high"], "figures of others are no setting"
    rpg, dapo = comparison.literature
    assert [rpg.label, dapo.label] == ["RPG, training.steps 60", "DAPO"]
    assert (rpg.theirs_last, rpg.theirs_best, rpg.num_checkpoints, dapo.num_checkpoints) == (0.4458, 0.4531, 3, 2)
    with Store.open(home.root) as store:
        query = "select avg(value) from evaluations where run_id like 'sums-0.1-%' and step = ?"
        assert [rpg.last, rpg.best] == [pytest.approx(store.query(query, (step,)).rows[0][0]) for step in (60, 20)]
        view = "select last, best from last_and_best order by cell::varchar limit 1"
        assert store.query(view).rows == [(pytest.approx(rpg.last), pytest.approx(rpg.best))]

    monkeypatch.setenv("RPG_HOME", str(home.root))
    shown = CliRunner().invoke(app, ["compare", "sums"]).stdout
    assert re.search(rf"last checkpoint two-terms, ours +{rpg.last:.4f} +{dapo.last:.4f} +- *\n", shown)
    assert "best checkpoint two-terms, ours (chosen on these problems: biased upward)" in shown
    assert re.search(r"best checkpoint two-terms, theirs +0.4531 +0.4479 +- *\n", shown)
    assert "Theirs: A paper, Table 5 (mean@32)." in shown
    assert "Ours: mean@8." in shown
    assert "The best of up to 3 checkpoints" in shown
    page = write_experiment_report(home, "sums").read_text()
    cells = re.findall(r'<td class="number(?: theirs)?">([\d.]+ %)</td>', page.split(">Beside the literature</h2>")[1])
    assert cells[:4] == [f"{100 * share:.1f} %" for share in (rpg.last, 0.4458, rpg.best, 0.4531)]
    assert "A misprint." in page
    assert "best checkpoint<br><small>chosen on these problems: biased upward</small>" in page


def test_figures_of_others_stand_beside_models_as_they_are_too_and_may_be_written_down_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    run_id = record_run(home, "models-a", before=0.4, steps=0, experiment="models")
    record_experiment(home, [run_id], "models")
    spec = as_it_is(home, run_id)
    record = home.experiment("models") / "experiment.json"
    write(record, json.loads(record.read_text()) | {"labels": {run_id: "Qwen, greedy"}})
    table = {"source": "A paper", "datasets": ["two-terms"], "rows": {"Qwen": [[0.47, 0.47]]}}
    today = spec | {"evaluation": spec["evaluation"] | {"literature": [table]}}
    write(home.experiment("models") / "spec.json", {"experiment": today})
    (figure,) = (comparison := compare(home, ["models"])).literature
    (measured,) = comparison.outcomes
    assert (figure.last, figure.best) == (measured.after.value, measured.after.value)
    assert (figure.label, figure.theirs_last) == ("Qwen, greedy", 0.47)
    assert "Ours: mean@8." in comparison.notes
    assert not any("The best of" in note for note in comparison.notes)

    record_run(home, "sums-s0", experiment="sums")
    monkeypatch.setenv("RPG_HOME", str(home.root))
    beside = CliRunner().invoke(app, ["compare", "models", "sums-s0"]).stdout
    assert re.search(r"^ *seeds +- +0 *$", beside, re.MULTILINE), "nobody trained the model as it is"
