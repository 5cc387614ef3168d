"""What was run under one name with other values stays apart: versions of an experiment."""

import json
from pathlib import Path

import pytest
from recorded_home import change_spec, record_run, write
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.home.runs import find_runs
from pipelines.home.versions import NoSuchVersionError, names_of_others
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.report.evidence import experiment_groups
from pipelines.running.run import register_experiment
from specs.loader import load_document
from tests.pipelines.planning.test_plan import SPEC


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


def run(home: Home, *overrides: str, in_addition: bool = False) -> list[str]:
    """Registers and records the runs that the spec gives with these overrides, as if they had been executed."""
    plan = make_plan(load_document(home.root.parent / "tiny.yaml", overrides), home)
    register_experiment(home, plan.document, plan.runs, in_addition=in_addition)
    for planned in plan.runs:
        if not home.run(planned.run_id).exists():
            record(home, planned)
    return [planned.run_id for planned in plan.runs]


def record(home: Home, planned: RunPlan) -> None:
    record_run(home, planned.run_id, seed=planned.seed, experiment="tiny", steps=4, problems=4)
    steps = planned.experiment.training.steps
    change_spec(home, planned.run_id, {"training": {"steps": steps}})
    write(home.run(planned.run_id) / "plan.json", planned.record())


def reported(home: Home, name: str) -> list[str]:
    return [run_id for group in experiment_groups(home, name) for run_id in group.run_ids]


def test_other_values_are_another_version_and_the_earlier_one_stays_askable(home: Home) -> None:
    first = run(home)
    second = run(home, "training.steps=3")
    assert reported(home, "tiny") == second
    assert reported(home, "tiny@1") == find_runs(home, "tiny@1") == first
    pages = {name: CliRunner().invoke(app, ["report", name]) for name in ("tiny", "tiny@1")}
    assert [page.stdout.rsplit("/")[-1] for page in pages.values()] == ["report.html\n", "report@1.html\n"]
    assert "also run with other values: tiny@1" in pages["tiny"].stderr
    assert "also run with other values: tiny@1" in Path(pages["tiny"].stdout.strip()).read_text()
    listed = json.loads(CliRunner().invoke(app, ["runs", "--experiment", "tiny@1", "--json"]).stdout)
    assert [run["run_id"] for run in listed] == first
    compared = json.loads(CliRunner().invoke(app, ["compare", "tiny@1", "tiny@2", "--json"]).stdout)
    assert compared["spec"] == {"training.steps": [2, 3]}
    with pytest.raises(NoSuchVersionError, match="there is no tiny@3; tiny has tiny@1, tiny@2"):
        reported(home, "tiny@3")


def test_other_seeds_of_the_same_cells_join_them(home: Home) -> None:
    first, others = run(home), run(home, "seeds=[1,2]")
    assert reported(home, "tiny") == [*first, *others]
    assert names_of_others(home, "tiny") == []


def test_what_is_run_again_is_the_version_that_it_was(home: Home) -> None:
    first, second = run(home), run(home, "training.steps=3")
    run(home)
    assert reported(home, "tiny") == first
    assert reported(home, "tiny@2") == second
    assert names_of_others(home, "tiny") == ["tiny@2"]


def test_another_evaluation_measures_the_same_version_again(home: Home) -> None:
    first = run(home)
    run(home, "evaluation.samples_per_problem=8")
    assert reported(home, "tiny") == first
    assert names_of_others(home, "tiny") == []


def test_the_trials_of_a_study_are_one_version(home: Home) -> None:
    trials = [*run(home, in_addition=True), *run(home, "objective.kl_coef=0.1", in_addition=True)]
    assert find_runs(home, "tiny") == trials


def test_runs_of_one_name_are_told_apart_by_what_was_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.cli.show import describe_run, list_runs, print_run
    from pipelines.report import write_run_report
    from pipelines.report.compare import compare
    from pipelines.web.pages import Pages

    home = Home(tmp_path)
    for run_id, steps in (("sums-a", 60), ("sums-b", 100)):
        record_run(home, run_id, steps=20)
        change_spec(home, run_id, {"training": {"steps": steps}})
    record_run(home, "sums-other", seed=1, steps=20)
    _, rows = list_runs(home, experiment=None, status=None, plain=False)
    assert {row[0]: row[1] for row in rows} == {
        "sums-a": "seed 0, training.steps 60",
        "sums-b": "seed 0, training.steps 100",
        "sums-other": "seed 1",
    }
    print_run(describe_run(home, "sums-b"), profile="https://prefect.example.org/api")
    out = capsys.readouterr().out
    assert "sums: seed 0, training.steps 100\n" in out
    assert "\n  rpg compare sums --profile https://prefect.example.org/api " in out
    assert "training.steps 100" in write_run_report(home, "sums-b").read_text().partition("<section")[0]
    labels = [group.label for group in compare(home, ["sums-a", "sums-b"]).groups]
    assert labels == ["training.steps 60", "training.steps 100"]
    pages = Pages(home)
    assert "seed 0, training.steps 60" in pages.index()
    pages.close()
