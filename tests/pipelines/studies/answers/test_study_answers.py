"""What a study's record says: which trial is best, on which ground, in SQL and in lists."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_trials
from recorded_home import record_run, write
from recorded_study import GOAL, HIGH, KL_GOAL, LOW, SCALE, arm, confirmation, params_of, pruned, record, study, trial
from tiny_study import EXPERIMENT
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.home.runs import NoSuchRunError, find_run
from pipelines.studies.answers.best import best_spec
from pipelines.studies.answers.results import StudyRecord, best_of, pareto_front, read_study
from specs import SpecError, load_experiment
from specs.errors import Position
from specs.reading.yaml import dump, parse_text
from specs.schema.experiment import Experiment
from storage import Store


def of(trials: list[dict[str, Any]], **changes: Any) -> StudyRecord:
    return StudyRecord.of(study(trials, **changes))


SEARCH = [trial(0, 0.5), trial(1, 0.6), trial(2, 0.7), trial(3, 0.65)]


def test_before_confirmation_the_best_trial_is_a_candidate() -> None:
    best = best_of(of(SEARCH))
    assert (best.trial, best.value, best.standing, best.baseline) == (2, 0.7, "candidate", False)
    lowest = best_of(of(SEARCH, goals=[GOAL | {"direction": "minimize"}]))
    assert lowest.trial == 0


def test_a_trial_that_breaks_a_constraint_is_never_best() -> None:
    best = best_of(of([*SEARCH, trial(4, 0.9, feasible=False)]))
    assert best.trial == 2
    assert best_of(of([trial(1, 0.5, feasible=False)])) is None


def test_a_trial_that_was_pruned_is_never_best() -> None:
    best = best_of(of([*SEARCH, pruned(4, 0.95)]))
    assert best.trial == 2


def test_a_confirmed_arm_comes_before_what_the_search_measured() -> None:
    arms = arm(0, [0.5] * 5), arm(2, [0.55] * 5), arm(3, [0.6] * 5)
    best = best_of(of(SEARCH, confirmation=confirmation(*arms)))
    assert (best.trial, best.standing) == (3, "confirmed")
    assert best.value == pytest.approx(0.6)


def test_the_baseline_is_best_where_no_candidate_comes_out_above_it() -> None:
    arms = arm(0, [0.6] * 5), arm(2, [0.55] * 5), arm(3, [0.6] * 5)
    best = best_of(of(SEARCH, confirmation=confirmation(*arms)))
    assert best.baseline
    assert best.params == params_of(0)


def test_an_arm_that_stopped_before_the_others_is_not_best_by_the_luck_of_its_few_seeds() -> None:
    arms = (
        arm(0, [0.50, 0.49, 0.42, 0.41, 0.40]),
        arm(3, [0.455, 0.465], [100, 101]),
        arm(7, [0.50, 0.51, 0.43, 0.42, 0.42]),
    )
    best = best_of(of(SEARCH, confirmation=confirmation(*arms)))
    assert (best.trial, best.value) == (7, pytest.approx(0.456))


def test_the_best_is_one_that_fresh_seeds_tell_from_the_baseline() -> None:
    arms = arm(0, [0.5] * 5), arm(2, [0.6] * 5), arm(3, [0.2, 1.0, 0.9, 0.8, 0.7])
    record = of(SEARCH, confirmation=confirmation(*arms))
    best = best_of(record, [record.measured[1]])
    assert best.trial == 2


def test_a_confirmation_under_way_confirms_nothing() -> None:
    arms = arm(0, [0.6] * 5), arm(2, [0.9, 0.9, 0.9, None, None])
    best = best_of(of(SEARCH, confirmation=confirmation(*arms), status="confirming"))
    assert (best.trial, best.standing) == (2, "candidate")


def test_the_pareto_front_has_the_trials_that_none_beats_in_all() -> None:
    def two(number: int, accuracy: float, divergence: float, **changes: Any) -> dict[str, Any]:
        return trial(number, accuracy, values=[accuracy, divergence], **changes)

    trials = [two(0, 0.5, 0.01), two(1, 0.6, 0.05), two(2, 0.55, 0.06), two(3, 0.6, 0.05), two(4, 0.4, 0.02)]
    record = of([*trials, two(5, 0.9, 0.0, feasible=False)], goals=[GOAL, KL_GOAL])
    assert sorted(trial.number for trial in pareto_front(record)) == [0, 1, 3]
    assert best_of(record) is None


def test_sql_has_all_that_is_recorded_of_a_trial(home: Home) -> None:
    kept = trial(0, 0.5, values=[0.5, 0.01], constraints={"kl/reverse": 0.01}, attempts=2)
    arms = arm(0, [0.5, 0.6, 0.5, 0.6, 0.5]), arm(1, [0.5, None, 0.5, 0.5, 0.5])
    record(home, study([kept, pruned(1, 0.3, 0.2)], confirmation=confirmation(*arms), status="confirming"))
    with Store.open(home.root) as store:
        query = (
            "SELECT value_low, value_high, \"values\", baseline, rung, rungs->'15'->>'value', feasible, "
            "constraints->>'kl/reverse', reason, tokens, gpu_hours, seconds, attempts FROM trials ORDER BY number"
        )
        first, second = store.query(query).rows
        status, tokens = store.query("SELECT status, spent.tokens FROM studies").rows[0]
        units = store.query("SELECT label, count(value), min(seed), max(state) FROM confirmations GROUP BY 1").rows
    assert first == (0.46, 0.54, "[0.5,0.01]", True, None, None, True, "0.01", "", 1000, 0.5, 120, 2)
    assert second[3:6] == (False, 30, "0.3")
    assert second[8] == "below the best half at step 30"
    assert (status, tokens) == ("confirming", 1250)
    assert sorted(units) == [("baseline", 5, 100, "finished"), ("trial 1", 4, 100, "pending")]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "specs" / "tiny.yaml"
    path.parent.mkdir()
    path.write_text(EXPERIMENT)
    return path


def test_the_best_spec_is_an_experiment_with_the_trials_settings(home: Home, experiment: Path, tmp_path: Path) -> None:
    cases = {"cases": {"pace": {"source": "snapshot", "update": {"every_steps": 4}}, "start": {"source": "initial"}}}
    params = params_of(2) | {"reference": "start"}
    del params["reference.update.every_steps"]
    data = study([trial(0, 0.5), trial(2, 0.7, params=params)], experiment=str(experiment))
    data |= {"parameters": data["parameters"] | {"reference": cases}, "overrides": {"training.steps": 3}}
    spec = best_spec(home, read_study(home, record(home, data)))
    path = tmp_path / "elsewhere" / "best.yaml"
    path.parent.mkdir()
    path.write_text(spec.text)
    loaded = load_experiment(path)
    assert loaded.name == "clips-best"
    assert loaded.seeds == (0, 1)
    assert loaded.training.steps == 3
    assert loaded.reference.source == "initial"
    assert loaded.objective.clip.low == params[LOW]  # type: ignore[union-attr]
    assert loaded.objective.clip.high == params[HIGH]  # type: ignore[union-attr]
    assert loaded.advantage.scale == params[SCALE]
    assert "# The best of study clips: trial 2, a candidate: mean@8 on two-terms 0.7 [0.66, 0.74]" in spec.text
    assert spec.warnings == ()


def test_paths_of_the_best_spec_hold_wherever_it_lies(home: Home, experiment: Path) -> None:
    problems = experiment.parent / "problems.jsonl"
    problems.write_text('{"problem": "1 + 1 =", "answer": "2"}\n' * 4)
    own = "    - {name: own, source: jsonl, path: problems.jsonl}\n"
    experiment.write_text(EXPERIMENT.replace("    - name: two-terms\n", own + "    - name: two-terms\n"))
    spec = best_spec(home, read_study(home, record(home, study(SEARCH, experiment=str(experiment)))))
    assert f"path: {problems}" in spec.text


def test_a_confirmed_best_says_so_and_a_better_baseline_too(home: Home, experiment: Path) -> None:
    arms = arm(0, [0.5] * 5), arm(2, [0.6] * 5)
    data = study(SEARCH, experiment=str(experiment), confirmation=confirmation(*arms))
    text = best_spec(home, read_study(home, record(home, data))).text
    assert "trial 2, confirmed: mean@8 on two-terms is 0.6 over 5 fresh seeds." in text
    data["confirmation"] = confirmation(arms[0], arm(2, [0.9] * 4 + [None]))
    data["confirmation"]["arms"][1]["units"][-1]["state"] = "failed"
    text = best_spec(home, read_study(home, record(home, data))).text
    assert "no difference from the baseline found: mean@8 on two-terms is 0.72 over 5 fresh seeds, of which 1 f" in text
    data["confirmation"] = confirmation(arms[0], arm(2, [0.3, 0.4, 0.5, 0.6, 0.9]))
    text = best_spec(home, read_study(home, record(home, data))).text
    assert "trial 2, no difference from the baseline found: mean@8 on two-terms is 0.54 over 5 fresh seeds." in text
    data["confirmation"] = confirmation(arms[0], arm(2, [0.4] * 5))
    text = best_spec(home, read_study(home, record(home, data))).text
    assert "the experiment's own values, confirmed" in text
    assert "no candidate beat it" in text
    assert load_text(text)["objective"]["clip"]["low"] == 0.2


def test_of_several_goals_a_trial_has_to_be_chosen(home: Home, experiment: Path) -> None:
    trials = [trial(0, 0.5, values=[0.5, 0.01]), trial(1, 0.6, values=[0.6, 0.05]), trial(2, 0.4, values=[0.4, 0.06])]
    record(home, study(trials, experiment=str(experiment), goals=[GOAL, KL_GOAL]))
    with pytest.raises(SpecError) as refused:
        best_spec(home, read_study(home, "clips"))
    (issue,) = refused.value.issues
    assert issue.message == "a study with several goals has no single best trial"
    assert issue.allowed.startswith("1 (mean@8 on two-terms 0.6 [0.56, 0.64], kl/reverse 0.05); 0 (")
    assert "2 (" not in issue.allowed
    assert (
        load_text(best_spec(home, read_study(home, "clips"), 1).text)["objective"]["clip"]["low"] == params_of(1)[LOW]
    )


def test_an_experiment_that_has_changed_since_the_trial_is_told(home: Home, experiment: Path) -> None:
    data = study(SEARCH, experiment=str(experiment))
    record(home, data)
    trained = load_text(best_spec(home, read_study(home, "clips")).text)
    spec = Experiment.model_validate(trained).model_dump(mode="json")
    write(home.run("trial-2-s0") / "spec.json", spec)
    assert best_spec(home, read_study(home, "clips")).warnings == ()
    experiment.write_text(EXPERIMENT.replace("group_size: 4", "group_size: 8"))
    (warning,) = best_spec(home, read_study(home, "clips")).warnings
    assert warning == "tiny.yaml has changed since trial 2 was trained: training.group_size"


def test_a_study_without_a_best_trial_is_a_users_error(home: Home, experiment: Path) -> None:
    record(home, study([pruned(1, 0.3)], experiment=str(experiment)))
    with pytest.raises(SpecError, match="no best trial yet"):
        best_spec(home, read_study(home, "clips"))
    with pytest.raises(SpecError, match="no such finished trial"):
        best_spec(home, read_study(home, "clips"), 1)


def test_the_command_writes_a_file_that_validates(
    home: Home, experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    record(home, study(SEARCH, experiment=str(experiment)))
    printed = CliRunner().invoke(app, ["study", "best", "clips"])
    written = CliRunner().invoke(app, ["study", "best", "clips", "-o", str(tmp_path / "best.yaml")])
    assert written.output.strip() == str(tmp_path / "best.yaml")
    assert printed.output == (tmp_path / "best.yaml").read_text()
    checked = CliRunner().invoke(app, ["validate", str(tmp_path / "best.yaml")])
    assert checked.exit_code == 0, checked.output
    assert "experiment clips-best" in checked.output


def test_the_list_tells_candidates_from_what_is_confirmed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    arms = arm(0, [0.5] * 5), arm(2, [0.6] * 5)
    record(home, study([*SEARCH, pruned(4, 0.2)], name="sure", confirmation=confirmation(*arms)))
    unsure = confirmation(arms[0], arm(2, [0.3, 0.4, 0.5, 0.6, 0.9]))
    record(home, study(SEARCH, name="equal", confirmation=unsure))
    record(home, study(SEARCH, name="hope", trials_wanted=8, status="searching"))
    text = CliRunner().invoke(app, ["study", "list"]).output
    hope, sure = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("hope", "sure"))
    assert "searching" in hope
    assert "4/8" in hope
    assert "0.7000  candidate: trial 2" in hope
    assert "no difference: trial 2" in text
    assert "5/5, 1 pruned" in sure
    assert "0.6000  confirmed: trial 2" in sure
    assert "4250 tokens" in sure
    assert "2.5 GPU hours" in sure
    listed = json.loads(CliRunner().invoke(app, ["study", "list", "--json"]).output)
    assert [entry["name"] for entry in listed] == ["equal", "hope", "sure"]


def shown(home: Home, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """What `rpg study show clips` prints of a study."""
    monkeypatch.setenv("RPG_HOME", str(home.root))
    record(home, study(changes.pop("trials"), **changes))
    return CliRunner().invoke(app, ["study", "show", "clips"]).output


def test_a_study_is_shown_on_one_screen(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(home, monkeypatch, trials=[*SEARCH, pruned(4, 0.2)])
    assert text.startswith("clips: finished, trials 5/5, 1 pruned, maximize ")
    assert "Candidate: " in text
    assert "0 (baseline)" in text
    assert "With `confirm` in its file, " in text
    assert text.endswith("  rpg study best clips -o clips-best.yaml\n\n")


def test_a_study_that_may_still_confirm_is_not_told_to(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(home, monkeypatch, trials=SEARCH, trials_wanted=8, status="searching")
    assert "Candidate: " in text
    assert "confirm` in its file" not in text


def test_a_study_that_is_confirmed_says_how_far_that_is(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = arm(0, [0.5, None, None, None, None]), arm(2, [0.6, None, None, None, None])
    text = shown(home, monkeypatch, trials=SEARCH, status="confirming", confirmation=confirmation(*arms))
    assert "The confirmation is not complete: 2 of 10 runs on fresh seeds have ended." in text


def test_a_study_of_several_goals_is_shown_with_all_of_them(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [trial(0, 0.5) | {"values": [0.5, 0.25]}, trial(1, 0.6) | {"values": [0.6, 0.75]}]
    text = shown(home, monkeypatch, trials=trials, goals=[GOAL, KL_GOAL])
    assert "0.75" in text
    assert "rpg study best clips --trial 1 -o clips-best.yaml" in text


def test_a_study_without_a_value_has_no_table_and_no_best(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(home, monkeypatch, trials=[], status="searching")
    assert text.splitlines()[1:] == ["No trial has finished yet."]


def test_a_study_is_named_where_a_run_is_asked_for(home: Home) -> None:
    record(home, study(SEARCH))
    record_run(home, "clips-s0-11111111", experiment="clips")
    with pytest.raises(NoSuchRunError, match=r"`clips` is a study: `rpg study show clips`"):
        find_run(home, "clips")
    assert find_run(home, "clips-s0") == "clips-s0-11111111"


def test_text_that_is_dumped_is_read_back_as_it_was() -> None:
    data = {
        "numbers": [1e-5, 1e22, 0.1, 3, -2.5, float("inf"), True, None],
        "texts": [
            "no",
            "08",
            ".1e8",
            "1e-4",
            "0o17",
            "~",
            "",
            "12:30",
            "a: b # c",
            "- x",
            "é\u2028",
            "true",
            "Null",
            "+.5",
            "=",
        ],
        "lines": "one\ntwo\n\n  three",
        "nested": [{"a": [[1, 2], []], "b": {}}, "x" * 500 + " y" * 300],
        "08": {"null": 1},
    }
    assert load_text(dump(data, comment="A title.\n\nAnd more.")) == data


def load_text(text: str) -> Any:
    node = parse_text(text, lambda line: Position("text", line, ""))
    return node.plain()


def test_a_study_records_the_baselines_own_values_that_its_ranges_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path
) -> None:
    inside = {tiny_trials.HIGH: {"float": [0.05, 1.0], "log": True}}
    document = tiny_trials.study_document(
        tmp_path / "specs", parameters={tiny_trials.LOW: {"float": [0.3, 0.5]}, **inside}, trials=3
    )
    tiny_trials.search(monkeypatch, document, home, tiny_trials.measured(tiny_trials.widest_is_best))
    study = read_study(home, "quick")
    own = document.own_value(tiny_trials.LOW)
    assert study.outside == {tiny_trials.LOW: own}
    assert tiny_trials.LOW not in study.baseline.params, "its sampler sees no point outside the space"
    assert study.params_of(study.baseline)[tiny_trials.LOW] == own
    assert list(study.params_of(study.baseline)) == list(study.parameters)
