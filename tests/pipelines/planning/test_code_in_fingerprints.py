"""Code in fingerprints: what counts as another result, what does not, and how a plan says so."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import PACKAGES
from releases import as_released, let_release_be
from test_plan import SPEC, finish, planned

from pipelines.home.home import Home
from pipelines.planning import code as coding
from pipelines.planning.code import COMPUTING, OURS, ROOT, Code, Release
from pipelines.planning.plan import Plan, RunPlan, make_plan, plan_run
from pipelines.report.compare import compare
from pipelines.running import stages
from pipelines.running.run import RunExecution, register_experiment, register_run
from pipelines.studies.conditions import changes, conditions
from specs.document import Document, Reuse
from specs.errors import SpecError
from specs.loader import load_document, load_study_document
from specs.machine.files import read_json, write_json

RIVALS = "rpg/objectives/rivals.py"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code as it stands is a release."""
    let_release_be(monkeypatch, as_released())


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the product's code, by which plans are made."""
    for package in ("specs", "rpg"):
        ignored = shutil.ignore_patterns("__pycache__", "*.yaml", "*.json")
        shutil.copytree(ROOT / package, tmp_path / "checkout" / package, ignore=ignored)
    monkeypatch.setattr(coding, "ROOT", tmp_path / "checkout")
    return tmp_path / "checkout"


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def flip(checkout: Path) -> None:
    """Turns the sign of a rival's loss."""
    edit(checkout / RIVALS, "    losses = -terms", "    losses = terms")


def short(plan: Plan) -> dict[str, str]:
    return {stage.stage: stage.fingerprint[:16] for stage in plan.runs[0].stages}


def actions(run: RunPlan) -> dict[str, str]:
    return {stage.stage: stage.action for stage in run.stages}


def reused(document: Document, home: Home, **reuse: Any) -> RunPlan:
    (run,) = make_plan(replace(document, reuse=Reuse(**reuse)), home).runs
    return run


def test_a_flipped_sign_is_another_training_and_the_plan_names_the_file(spec: Path, home: Home, checkout: Path) -> None:
    finish(planned(spec, home).runs[0], home)
    flip(checkout)
    (run,) = planned(spec, home).runs
    assert actions(run) == {"data": "CACHED", "base": "CACHED", "train": "RUN", "evaluate": "RUN", "report": "RUN"}
    assert run.stage("train").reason == f"the code of train differs from {coding.release().version}"
    assert run.stage("evaluate").reason == "train changed"
    first = run.stage("train").fingerprint
    edit(checkout / RIVALS, "    losses = terms", "    losses = 2 * terms")
    assert planned(spec, home).runs[0].stage("train").fingerprint != first
    shutil.copy(ROOT / RIVALS, checkout / RIVALS)
    assert set(actions(planned(spec, home).runs[0]).values()) == {"CACHED"}


def test_titles_messages_rules_comments_and_docstrings_are_no_part_of_a_result(
    spec: Path, home: Home, checkout: Path
) -> None:
    finish(planned(spec, home).runs[0], home)
    rivals = checkout / RIVALS
    text = re.sub(r'"""', '"""Otherwise said. ', rivals.read_text(), count=1)
    rivals.write_text("# A comment.\n" + text.replace("    return", "    # Another.\n\n    return"))
    for file, before, after in (
        ("specs/metrics.py", "Mean reward", "Average reward"),
        ("specs/rules/idle.py", "has no effect", "does nothing"),
        ("specs/schema/objective.py", "class Grpo", "class Other(Spec): ...\n\n\nclass Grpo"),
        ("rpg/statistics/wording.py", "best", "top"),
        ("rpg/trainer.py", "; the update is skipped", "; this update is left out"),
        ("rpg/base/stage.py", "transformers knows no such decoder architecture", "unknown architecture"),
        ("rpg/base/stage.py", "without a network, give", "offline, name"),
        ("rpg/data/staging.py", "no problems", "not one problem"),
    ):
        edit(checkout / file, before, after)
    assert set(actions(planned(spec, home).runs[0]).values()) == {"CACHED"}


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("rpg/tools/functions/calculator.py", "a power too large", "too large a power"),
        ("rpg/rollouters/environments/tools.py", "no more than", "at most"),
    ],
)
def test_what_a_tool_answers_is_part_of_a_result_in_words(checkout: Path, file: str, before: str, after: str) -> None:
    entries = ("rpg.rollouters.environments.tools", "rpg.tools.functions.calculator")
    as_released = Code().digest(*entries)
    edit(checkout / file, before, after)
    assert Code().digest(*entries) != as_released


def test_a_schedule_computes_values_of_training(spec: Path, home: Home, checkout: Path) -> None:
    finish(planned(spec, home).runs[0], home)
    edit(checkout / "specs" / "schema" / "schedule.py", "return", "return 2 *")
    run = planned(spec, home).runs[0]
    assert [stage.stage for stage in run.stages if OURS in stage.code] == ["train"]


def test_what_training_calls_of_specs_computes_no_value_or_counts() -> None:
    code, called = Code(), dict[str, str]()
    for name in code.reach(*code_units()):
        for path, _ in code._module(name).imports:
            module, _, function = path.rpartition(".")
            if module.startswith("specs.schema.") and function.islower():
                called[function] = module
    in_words = {"addition", "describe", "execution", "members", "names_path", "nearest", "not_installed", "number"}
    in_words |= {"direction_of"}  # which divergence a formula claims: its certificate alone depends on it
    assert {name: module for name, module in called.items() if module not in COMPUTING}.keys() <= in_words


def code_units() -> list[str]:
    return list(coding.release().code)


def test_code_that_a_stage_does_not_reach_changes_nothing(spec: Path, home: Home, checkout: Path) -> None:
    before = short(planned(spec, home))
    (checkout / "rpg" / "rewards" / "functions" / "math_dapo.py").write_text("raise SystemExit\n")
    (checkout / "rpg" / "samplers" / "vllm" / "sampler.py").write_text("raise SystemExit\n")
    assert short(planned(spec, home)) == before


@pytest.mark.parametrize(
    ("file", "override"),
    [
        ("rpg/rewards/functions/math_dapo.py", "reward.type=math_dapo"),
        ("rpg/samplers/vllm/sampler.py", "rollout.engine=vllm"),
        ("rpg/samplers/vllm/engine_process.py", "rollout.engine=vllm"),
        ("rpg/rewards/worker.py", "reward.type=math_verify"),
        ("rpg/rollouters/environments/single_turn.py", "rollout.rollouter={type: single_turn}"),
    ],
)
def test_what_the_spec_names_and_what_is_started_as_a_process_is_reached(
    spec: Path, home: Home, checkout: Path, file: str, override: str
) -> None:
    before = short(planned(spec, home, override))
    (checkout / file).write_text("raise SystemExit\n")
    (run,) = planned(spec, home, override).runs
    assert set(run.stage("train").code) == set(run.stage("evaluate").code) == {OURS}
    assert {name for name, digest in before.items() if digest != run.stage(name).fingerprint[:16]} == {
        *("train", "evaluate", "report"),
    }


def test_a_file_that_does_not_parse_differs(spec: Path, home: Home, checkout: Path) -> None:
    (checkout / RIVALS).write_text("def broken(:\n")
    assert list(planned(spec, home).runs[0].stage("train").code) == [OURS]


def test_a_moved_file_changes_nothing(spec: Path, home: Home, checkout: Path) -> None:
    """With all who import it, and where they import it from, sorted anew as an import sorter does."""
    before = short(planned(spec, home))
    for old, new in (("rpg.objectives.kl", "rpg.losses.penalties"), ("specs.machine.files", "specs.aaa.disk")):
        target = checkout / f"{new.replace('.', '/')}.py"
        target.parent.mkdir()
        (target.parent / "__init__.py").write_text('"""A room of its own."""\n')
        (checkout / f"{old.replace('.', '/')}.py").rename(target)
        for path in checkout.rglob("*.py"):
            text = path.read_text()
            if f"from {old} import" in text:
                path.write_text(text.replace(f"from {old} import", f"from {new} import"))
    sort = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "I",
        "--fix",
        "-q",
        "--config",
        str(ROOT / "pyproject.toml"),
    ]
    subprocess.run([*sort, str(checkout)], check=True)
    assert short(planned(spec, home)) == before
    with (checkout / "rpg" / "losses" / "penalties.py").open("a") as file:
        file.write("EXTRA = 1\n")
    assert list(planned(spec, home).runs[0].stage("train").code) == [OURS]


def test_two_files_that_take_each_others_place_are_a_change(spec: Path, home: Home, checkout: Path) -> None:
    rivals, regularized = checkout / RIVALS, checkout / "rpg" / "objectives" / "regularized.py"
    first, second = rivals.read_bytes(), regularized.read_bytes()
    rivals.write_bytes(second)
    regularized.write_bytes(first)
    (run,) = planned(spec, home).runs
    assert list(run.stage("train").code) == [OURS]
    rivals.unlink()
    assert planned(spec, home).runs[0].stage("train").code != run.stage("train").code


def test_two_imports_that_trade_modules_are_a_change(tmp_path: Path) -> None:
    package = tmp_path / "rpg"
    package.mkdir()
    lines = ("from rpg.{} import loss as first", "from rpg.{} import loss as second")
    for name in ("clipped", "plain"):
        (package / f"{name}.py").write_text(f"def loss():\n    return {name!r}\n")
    digests = []
    for text in (
        "\n".join(lines).format("clipped", "plain"),
        "\n".join(reversed(lines)).format("plain", "clipped"),
        "\n".join(lines).format("plain", "clipped"),
    ):
        (package / "main.py").write_text(text)
        digests.append(Code(tmp_path).digest("rpg.main"))
    assert digests[0] == digests[1] != digests[2]


def test_a_release_with_the_same_results_keeps_what_is_recorded_and_one_with_others_names_itself(
    spec: Path, home: Home, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(planned(spec, home).runs[0], home)
    flip(checkout)
    same = replace(as_released(), version="0.2.0")
    let_release_be(monkeypatch, same)
    assert set(actions(planned(spec, home).runs[0]).values()) == {"CACHED"}
    let_release_be(monkeypatch, replace(same, results=same.results | {"train": same.results["train"] + 1}))
    (run,) = planned(spec, home).runs
    assert actions(run) == {"data": "CACHED", "base": "CACHED", "train": "RUN", "evaluate": "RUN", "report": "RUN"}
    assert run.stage("train").reason == "train gives other results since 0.2.0"


def test_the_release_is_written_from_the_code_as_it_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(coding, "RELEASE", tmp_path / "release.json")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    writing = importlib.import_module("write_release")
    monkeypatch.setattr(writing, "RELEASE", tmp_path / "release.json")
    writing.main()
    written = Release(**json.loads((tmp_path / "release.json").read_text()))
    assert written == coding.release()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert written.version == project["version"], "write pipelines/planning/release.json, see docs/releasing.md"


@pytest.mark.usefixtures("modules_forgotten")
def test_a_changed_module_of_an_installed_package_is_another_result(
    spec: Path, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    shutil.copytree(PACKAGES, packages)
    coding._places.cache_clear()
    monkeypatch.syspath_prepend(str(packages))
    for name in [name for name in sys.modules if name.startswith("rpg_brevity")]:
        monkeypatch.delitem(sys.modules, name)
    by_brevity = "reward={type: brevity, spare: 2}"
    try:
        (before,) = planned(spec, home, by_brevity).runs
        assert set(before.stage("train").code) == {"rpg_brevity"}
        finish(before, home)
        reward = packages / "rpg_brevity" / "reward.py"
        reward.write_text(f"# A comment.\n{reward.read_text()}")
        assert set(actions(planned(spec, home, by_brevity).runs[0]).values()) == {"CACHED"}
        reward.write_text(f"{reward.read_text()}\nFACTOR = 2\n")
        (run,) = planned(spec, home, by_brevity).runs
        assert (run.stage("base").action, run.stage("train").action) == ("CACHED", "RUN")
        assert run.stage("train").reason == "rpg_brevity changed"
    finally:
        coding._places.cache_clear()


def test_another_version_of_a_library_that_scores_is_another_result_where_it_scores(
    spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_library = "reward.type=math_verify"
    finish(planned(spec, home, by_library).runs[0], home)
    before, other = coding.installed, short(planned(spec, home))
    monkeypatch.setattr(coding, "installed", lambda name: "9.9" if name == "math-verify" else before(name))
    assert short(planned(spec, home)) == other
    (run,) = planned(spec, home, by_library).runs
    assert run.stage("train").reason == f"math-verify {coding.release().libraries['math-verify']} -> 9.9"
    assert run.stage("base").action == "CACHED"
    monkeypatch.setattr(coding, "installed", lambda name: "9.9" if name == "reasoning-gym" else before(name))
    assert planned(spec, home).runs[0].stage("data").code == {"reasoning-gym": "9.9"}


def test_a_plan_says_with_what_else_a_cached_result_was_computed(spec: Path, home: Home) -> None:
    (run,) = planned(spec, home).runs
    finish(run, home)
    for name in ("data", "base"):
        path = run.stage(name).output / "manifest.json"
        write_json(path, read_json(path) | {"versions": {"torch": "1.0", "datasets": "1.0", "vllm": "0.0.1"}})
    (again,) = planned(spec, home).runs
    assert again.stage("base").reason.startswith("done, with torch 1.0 (here ")
    assert (again.stage("base").action, again.stage("data").reason) == ("CACHED", "done")


def test_accepted_results_are_taken_and_what_is_still_to_run_has_the_code_of_today(
    spec: Path, home: Home, checkout: Path
) -> None:
    (before,) = planned(spec, home).runs
    finish(before, home)
    flip(checkout)
    document = load_document(spec)
    run = reused(document, home, accept_code=True)
    assert run.run_id == before.run_id
    assert actions(run) == dict.fromkeys(actions(run), "CACHED")
    why = f"done by other code, accepted: the code of train differs from {coding.release().version}"
    assert run.stage("train").reason == why
    again = load_document(spec, ["evaluation.samples_per_problem=8"])
    (checkout / "rpg" / "evaluation" / "policies.py").write_text("raise SystemExit\n")
    evaluate = reused(again, home, accept_code=True).stage("evaluate")
    assert (evaluate.action, evaluate.inputs["train"]) == ("RUN", before.stage("train").fingerprint)
    assert list(evaluate.code) == [OURS]
    assert plan_run(replace(document, reuse=Reuse(accept_code=True)), before.run_id, home).run_id == before.run_id


def test_what_edited_code_has_made_is_accepted_by_the_code_as_released(spec: Path, home: Home, checkout: Path) -> None:
    flip(checkout)
    (edited,) = planned(spec, home).runs
    finish(edited, home)
    shutil.copy(ROOT / RIVALS, checkout / RIVALS)
    again = f"the code of train is that of {coding.release().version} again"
    assert planned(spec, home).runs[0].stage("train").reason == again
    run = reused(load_document(spec), home, accept_code=True)
    assert (run.run_id, run.stage("train").action) == (edited.run_id, "CACHED")
    assert run.stage("train").fingerprint == edited.stage("train").fingerprint


def test_of_another_spec_nothing_is_accepted(spec: Path, home: Home, checkout: Path) -> None:
    finish(planned(spec, home).runs[0], home)
    flip(checkout)
    other = load_document(spec, ["objective.kl_coef=0.5"])
    assert reused(other, home, accept_code=True).stage("train").action == "RUN"
    other_data = load_document(spec, ["data.train.0.size=60"])
    assert reused(other_data, home, accept_code=True).stage("train").action == "RUN"


@pytest.mark.parametrize(
    "change", ["data.overlap=error", "data.train=[{source: reasoning_gym, task: chain_sum, size: 50}]"]
)
def test_what_was_trained_on_more_or_on_less_is_not_accepted(
    spec: Path, home: Home, checkout: Path, change: str
) -> None:
    one = "source: reasoning_gym, task: chain_sum, size: 50"
    two = f"{{{one}}}, {{{one}, seed: 2}}"
    document = load_document(spec, ["data.overlap=drop", f"data.train=[{two}]"])
    (before,) = make_plan(document, home).runs
    finish(before, home)
    flip(checkout)
    assert reused(document, home, accept_code=True).stage("train").action == "CACHED"
    other = load_document(spec, ["data.overlap=drop", f"data.train=[{two}]", change])
    assert reused(other, home, accept_code=True).stage("train").action == "RUN"


def test_runs_of_another_results_number_are_another_version(
    spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = planned(spec, home).runs
    later = coding.release()
    let_release_be(monkeypatch, replace(later, results=later.results | {"train": later.results["train"] + 1}))
    assert planned(spec, home).runs[0].recipe != run.recipe


def test_data_that_other_code_has_made_is_named_as_such_in_what_is_trained_on_it(
    spec: Path, home: Home, checkout: Path
) -> None:
    (before,) = planned(spec, home).runs
    finish(before, home)
    edit(checkout / "rpg" / "data" / "overlap.py", "import", "import os\nimport")
    other = "objective.kl_coef=0.5"
    by_today = planned(spec, home, other).runs[0].stage("train")
    accepting = reused(load_document(spec, [other]), home, accept_code=True)
    assert accepting.stage("data").fingerprint == before.stage("data").fingerprint
    assert accepting.stage("train").inputs == before.stage("train").inputs != by_today.inputs


def test_the_record_of_a_run_says_what_was_accepted(spec: Path, home: Home, checkout: Path) -> None:
    (before,) = planned(spec, home).runs
    finish(before, home)
    flip(checkout)
    document = replace(load_document(spec), reuse=Reuse(accept_code=True))
    execution = RunExecution(document, before.run_id, home)
    train = execution.plan.stage("train")
    assert stages.perform_stage(execution, train) == "cached"
    assert execution.state.stage("train")["reason"] == train.reason
    assert "accepted" in train.reason
    (execution.directory / "result").write_text("other")
    with pytest.raises(SpecError, match="the accepted result is no longer complete"):
        stages.perform_stage(execution, train)


def test_why_a_page_was_not_written_is_in_its_log(spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = planned(spec, home).runs
    finish(run, home)
    execution = RunExecution(load_document(spec), run.run_id, home)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pipelines.report.write_run_report", fail)
    (execution.directory / "report.html").unlink(missing_ok=True)
    with pytest.raises(ZeroDivisionError):
        stages.perform_stage(execution, replace(execution.plan.stage("report"), fingerprint="f" * 64))
    assert "ZeroDivisionError" in (execution.directory / "logs" / "report.log").read_text()


def test_a_stage_is_not_begun_by_code_that_was_edited_after_the_plan(spec: Path, home: Home, checkout: Path) -> None:
    document = load_document(spec)
    (run,) = make_plan(document, home).runs
    execution = RunExecution(document, run.run_id, home)
    flip(checkout)
    with pytest.raises(SpecError, match="code was changed after") as refused:
        stages.perform_stage(execution, execution.plan.stage("train"))
    assert refused.value.issues[0].given == OURS
    with pytest.raises(SpecError, match="or the code another version"):
        plan_run(document, run.run_id, home)


def test_what_is_asked_for_anew_is_done_once_more_and_no_more(spec: Path, home: Home) -> None:
    (run,) = planned(spec, home).runs
    finish(run, home)
    document = load_document(spec)
    now = (home.run(run.run_id) / "train.json").stat().st_mtime_ns
    later = reused(document, home, fresh=("train", "evaluate", "report"), asked_at_ns=now + 10**9)
    assert actions(later) == {"data": "CACHED", "base": "CACHED", "train": "RUN", "evaluate": "RUN", "report": "RUN"}
    assert later.stage("train").reason == "computed again, as requested"
    assert later.run_id == run.run_id
    earlier = reused(document, home, fresh=("train", "evaluate", "report"), asked_at_ns=now - 10**9)
    assert set(actions(earlier).values()) == {"CACHED"}
    renamed = load_document(spec, ["name=other"])
    assert reused(renamed, home, fresh=("train",), asked_at_ns=now + 10**9).stage("train").action == "RUN"


def test_training_that_is_made_anew_begins_at_the_first_step(spec: Path, home: Home) -> None:
    (run,) = planned(spec, home).runs
    finish(run, home)
    directory = home.run(run.run_id)
    for step in (1, 2):
        write_json(directory / "checkpoints" / f"step-{step:06}" / "manifest.json", {})
    os.utime(directory / "checkpoints" / "step-000001", (1, 1))
    write_json(directory / "guards.json", [])
    for name in ("train.json", "guards.json"):
        os.utime(directory / name, (1, 1))
    stages._forget_older(directory, 2 * 10**9)
    assert not (directory / "train.json").exists()
    assert not (directory / "guards.json").exists(), "roll-backs of before would lower the learning rate"
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-000002"]


def test_an_evaluation_that_is_made_anew_keeps_no_answer_of_an_earlier_one(tmp_path: Path) -> None:
    kept = tmp_path / "answers" / "fingerprint" / "step-000001"
    for name in ("before", "since"):
        write_json(kept / f"{name}.json", {"answers": []})
    os.utime(kept / "before.json", (1, 1))
    stages._forget_older_answers(tmp_path / "answers", 0)
    assert len(list(kept.iterdir())) == 2
    stages._forget_older_answers(tmp_path / "answers", 2 * 10**9)
    assert [path.name for path in kept.iterdir()] == ["since.json"]


def test_what_a_run_may_reuse_is_frozen_with_it(spec: Path) -> None:
    document = replace(load_document(spec), reuse=Reuse(True, ("train",), 5))
    assert Document.from_json(json.loads(json.dumps(document.to_json()))).reuse == document.reuse
    assert "reuse" not in load_document(spec).to_json()


def test_runs_of_other_code_are_another_version_and_differ_in_a_comparison(
    spec: Path, home: Home, checkout: Path
) -> None:
    runs: list[RunPlan] = []
    for change in (lambda: None, lambda: flip(checkout)):
        change()
        document = load_document(spec)
        (run,) = make_plan(document, home).runs
        register_experiment(home, document, (run,))
        register_run(home, document, run)
        finish(run, home)
        register_experiment(home, document, (run,))
        runs.append(run)
    record = read_json(home.experiment("tiny") / "experiment.json")
    assert runs[0].recipe != runs[1].recipe
    assert len(record["versions"]) >= 1
    comparison = compare(home, [run.run_id for run in runs])
    assert comparison.spec == {"code.train.rpg": ["as released", runs[1].stage("train").code[OURS]]}


def test_a_study_does_not_go_on_with_other_code(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    study = tmp_path / "study.yaml"
    study.write_text(
        "name: search\nexperiment: tiny.yaml\nparameters: {objective.kl_coef: {float: [0.001, 0.1]}}\n"
        "goal: {dataset: held_out}\ntrials: 4\n"
    )
    document = load_study_document(study)
    before = conditions(document)
    assert changes(before, document) == []
    flip(checkout)
    (issue,) = changes(before, document)
    assert issue.message.endswith("other code than the stored study's trials; it differs in: train")


def test_another_seed_is_compared_with_the_same_cell_and_the_matrix_comes_first(spec: Path, home: Home) -> None:
    spec.write_text(SPEC + "matrix: {product: {training.epochs: [1, 2]}}\n")
    first, second = planned(spec, home).runs
    for run in (first, second):
        finish(run, home)
    listed = {"runs": [second.run_id, first.run_id]}
    write_json(home.experiment("tiny") / "experiment.json", listed)
    other_seed = planned(spec, home, "seeds=[5]").runs
    assert [run.stage("train").reason for run in other_seed] == ["seed 5 is new (--set)"] * 2
    changed = planned(spec, home, "matrix.product.training.epochs=[3]", "advantage.scale=group_std").runs[0]
    assert changed.stage("train").reason.startswith("training.epochs 1 -> 3 (--set); advantage.scale ")
