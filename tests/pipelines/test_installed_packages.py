"""A reward and a data source of an installed package, through the commands: trained with, recorded, and missed."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from live import SPEC, Lab, copy_prefect_database
from places import PACKAGES

from tests.rpg.tiny_run import finish, start

pytestmark = pytest.mark.more

REWARD = """\
reward:
  type: weighted_sum
  terms:
    - reward: {type: exact_match}
    - {name: short, weight: 0.5, reward: {type: brevity, spare: 2}}
"""
DATA = """\
  train:
    - {source: bits, bits: 4, files: [more.txt]}
  evaluation:
    - {name: held_out, source: bits, bits: 3}
  prompt: {type: template, template: "{prompt}"}
"""


def spec() -> str:
    before, rest = SPEC.split("  train:\n")
    _, rest = rest.split("  overlap: drop\n")
    text = before + DATA + rest.replace("reward: {type: exact_match}\n", REWARD).replace("steps: 6", "steps: 4")
    return "".join(line for line in text.splitlines(True) if not line.startswith("warm_up"))


@pytest.fixture(scope="module")
def trained(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package, a spec that names it, and the home of its finished run."""
    directory = tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGES, directory / "packages")
    (directory / "more.txt").write_text("10101\n")
    (directory / "spec.yaml").write_text(spec())
    lab = Lab(directory / "home", directory / "spec.yaml")
    copy_prefect_database(prepared_home, lab.root)
    try:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, directory)
            result = lab.rpg("run", str(lab.spec), timeout=480)
    finally:
        lab.clean_up()
    assert result.code == 0, result.err
    return directory


@pytest.fixture
def lab(trained: Path) -> Lab:
    return Lab(trained / "home", trained / "spec.yaml")


def install(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """For the processes started from here on."""
    patch.setenv("PYTHONPATH", str(directory / "packages"), prepend=os.pathsep)


def test_each_term_is_recorded_and_the_reward_is_their_sum(lab: Lab):
    rows = lab.query("select step, name, value from metrics where name like 'reward/%/mean' or name = 'reward/mean'")
    values = {(step, name): value for step, name, value in rows}
    assert {step for step, _ in values} == {1, 2, 3, 4}
    for step in range(1, 5):
        terms = values[step, "reward/exact_match/mean"] + 0.5 * values[step, "reward/short/mean"]
        assert values[step, "reward/mean"] == pytest.approx(terms, abs=1e-6)
    assert lab.query("select count(*) from rollouts where reward_error is not null") == [(0,)]


def test_the_first_term_decides_what_an_evaluation_counts_as_correct(lab: Lab):
    rows = lab.query("select correct, trim(response) = trim(answer), score from evaluation_samples")
    assert len(rows) == 2 * 8 * 2  # two policies, all strings of three bits, two samples each
    assert all(correct == equal for correct, equal, _ in rows)
    assert {score for _, _, score in rows} - {0.0, 1.0}  # the second term's part is in the score


def test_a_second_call_finds_everything_done(lab: Lab, trained: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, trained)
    plan = lab.rpg("plan", str(lab.spec), "--json")
    assert plan.code == 0, plan.err
    (run,) = json.loads(plan.out)["runs"]
    assert {stage["action"] for stage in run["stages"]} == {"CACHED"}


@pytest.mark.long
def test_another_version_of_the_package_is_another_result_and_the_plan_says_why(
    lab: Lab, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(trained / "packages", tmp_path / "packages")
    (old,) = (tmp_path / "packages").glob("rpg_brevity-*.dist-info")
    metadata = (old / "METADATA").read_text().replace("Version: 0.3", "Version: 0.4")
    (old / "METADATA").write_text(metadata)
    old.rename(old.with_name("rpg_brevity-0.4.dist-info"))
    install(monkeypatch, tmp_path)
    plan = lab.rpg("plan", str(lab.spec))
    assert plan.code == 0, plan.err
    reasons = " ".join(plan.out.split())
    assert "data.evaluation.0.source bits (rpg-brevity 0.3) -> bits (rpg-brevity 0.4) (spec.yaml:" in reasons
    assert "reward.terms.1.reward.type brevity (rpg-brevity 0.3) -> brevity (rpg-brevity 0.4) (spec.yaml:" in reasons
    resumed = lab.rpg("resume", *lab.run_ids())
    assert resumed.code == 2
    assert "brevity (rpg-brevity 0.3) -> brevity (rpg-brevity 0.4)" in resumed.err


def test_without_the_package_nothing_runs_and_what_is_recorded_can_be_read(lab: Lab):
    (run_id,) = lab.run_ids()
    for command in (("run", str(lab.spec)), ("resume", run_id)):
        result = lab.rpg(*command)
        assert result.code == 2
        assert "reward.terms.1.reward.type: unknown type" in result.err
        assert "data.train.0.source: unknown source" in result.err
        assert "Traceback" not in result.err
    shown = lab.rpg("show", run_id, "--all")
    assert shown.code == 0, shown.err
    assert "brevity" in shown.out


def test_a_trainer_on_a_machine_without_the_package_says_what_is_missing(trained: Path, tmp_path: Path):
    (run,) = (trained / "home" / "runs").iterdir()
    shutil.copytree(run, tmp_path / "run")
    said = finish(start([sys.executable, "-m", "rpg.train", str(tmp_path / "run")]), expect=2)
    assert "reward.terms.1.reward.type: unknown type" in said
    issues = json.loads((tmp_path / "run" / "problems.json").read_text())
    assert ["reward", "terms", 1, "reward", "type"] in [issue["path"] for issue in issues]
