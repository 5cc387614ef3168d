import json
from pathlib import Path

import pytest
from recorded_home import record_experiment, record_run, record_two_cells
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home import Home
from pipelines.report.compare import compare
from pipelines.runs import NoSuchRunError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    record_two_cells(home)
    return home


def test_an_experiments_cells_are_groups_of_seeds(home: Home) -> None:
    found = compare(home, ["sums"])
    assert [group.label for group in found.groups] == ["objective.clip.high 0.1", "objective.clip.high 0.28"]
    assert [len(group.runs) for group in found.groups] == [3, 3]
    assert found.spec == {"objective.clip.high": [0.1, 0.28]}
    reward = [measure for measure in found.measures if measure.metric == "reward/mean"]
    assert reward[0].against_first is None
    assert reward[1].against_first is not None
    assert reward[1].against_first.excludes(0)
    assert reward[1].against_first.value == pytest.approx(reward[1].value.value - reward[0].value.value)


def test_a_metric_that_is_everywhere_the_same_shows_no_difference(home: Home) -> None:
    rates = [measure for measure in compare(home, ["sums"]).measures if measure.metric == "learning_rate"]
    assert [measure.against_first for measure in rates] == [None, None]


def test_single_runs_are_compared_by_problem_and_have_no_seed_interval(home: Home) -> None:
    found = compare(home, ["sums-narrow-s0", "sums-wide-s0"])
    assert found.outcomes[1].against_first is not None
    assert all(measure.value.low != measure.value.low for measure in found.measures)


def test_groups_of_two_experiments_with_equal_cells_are_told_apart(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in ("sums", "more"):
        values = {"objective.clip.high": 0.1}
        record_experiment(home, [record_run(home, f"{name}-s0", values=values, experiment=name)], name)
    labels = [group.label for group in compare(home, ["sums", "more"]).groups]
    assert labels == ["sums: objective.clip.high 0.1", "more: objective.clip.high 0.1"]


def test_an_unknown_name_is_a_users_error(home: Home) -> None:
    with pytest.raises(NoSuchRunError, match="no run `nothing`"):
        compare(home, ["nothing"])


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
