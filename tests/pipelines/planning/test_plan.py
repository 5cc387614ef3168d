"""The plan: the inputs of results, finished work, and reasons to run a stage."""

import json
from pathlib import Path
from typing import Any

import pytest
from places import PACKAGES
from typer.testing import CliRunner

from pipelines.api import load
from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.home.results import manifest_of
from pipelines.planning.fingerprint import base_identity, data_identity, evaluate_identity, fingerprint, flatten
from pipelines.planning.gpu_hours import precision_warnings
from pipelines.planning.plan import Plan, RunPlan, make_plan, plan_run
from pipelines.running.run import register_run
from specs.errors import SpecError
from specs.loader import load_document
from specs.machine.manifests import NOTES, list_files
from specs.schema.experiment import Experiment
from storage.provenance import provenance_rows

SPEC = """\
name: tiny
model: {source: scratch, config: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
data:
  train:
    - {source: reasoning_gym, task: chain_sum, size: 50, seed: 1}
  evaluation:
    - {source: reasoning_gym, task: chain_sum, size: 20, seed: 90001, name: held_out}
reward: {type: exact_match}
objective: {type: rpg, kl_coef: 1.0e-2}
training:
  steps: 2
  prompts_per_step: 4
  group_size: 2
  minibatches: 2
evaluation:
  samples_per_problem: 4
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC)
    return path


def planned(spec: Path, home: Home, *overrides: str) -> Plan:
    return make_plan(load_document(spec, overrides), home)


def fingerprints(spec: Path, home: Home, *overrides: str) -> dict[str, str]:
    return {stage.stage: stage.fingerprint for stage in planned(spec, home, *overrides).runs[0].stages}


def changed(spec: Path, home: Home, *overrides: str) -> set[str]:
    before, after = fingerprints(spec, home), fingerprints(spec, home, *overrides)
    return {stage for stage in before if before[stage] != after[stage]}


def finish(run: RunPlan, home: Home) -> None:
    """Writes the files of a finished run that a plan reads."""
    state: dict[str, Any] = {"stages": {}}
    for stage in run.stages:
        state["stages"][stage.stage] = {"fingerprint": stage.fingerprint, "status": "finished"}
        if stage.stage == "report":
            stage.output.write_text("<html>")
            continue
        stage.output.mkdir(parents=True, exist_ok=True)
        (stage.output / "result").write_text("12345")
        manifest = {"fingerprint": stage.fingerprint, "files": list_files(stage.output, ["result"])}
        manifest_of(stage.stage, stage.output).write_text(json.dumps(manifest))
    directory = home.run(run.run_id)
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "plan.json").write_text(json.dumps(run.record()))
    home.experiment("tiny").mkdir(parents=True, exist_ok=True)
    (home.experiment("tiny") / "experiment.json").write_text(json.dumps({"runs": [run.run_id]}))


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("evaluation.samples_per_problem=8", {"evaluate", "report"}),
        ("evaluation.every_steps=1", {"train", "evaluate", "report"}),
        ("objective.kl_coef=0.1", {"train", "evaluate", "report"}),
        ("seeds=[3]", {"train", "evaluate", "report"}),
        ("model.seed=4", {"base", "train", "evaluate", "report"}),
        ("data.train.0.size=60", {"data", "train", "evaluate", "report"}),
        ("data.evaluation.0.size=30", {"data", "evaluate", "report"}),
        ("question=Why?", {"report"}),
    ],
)
def test_a_change_reaches_the_stages_that_depend_on_it(spec: Path, home: Home, override: str, stages: set[str]) -> None:
    assert changed(spec, home, override) == stages


@pytest.mark.parametrize(
    "override",
    [
        "training.ranks=2",
        "training.zero_stage=3",
        "training.microbatch_tokens=64",
        "training.checkpoint.every_steps=1",
        "resources.threads=1",
        "stages.train.retries=3",
        "rollout.max_concurrent=2",
        "record={tokens: sampled, keep_days: 30}",
    ],
)
def test_how_and_where_a_run_executes_is_no_part_of_its_identity(spec: Path, home: Home, override: str) -> None:
    assert not changed(spec, home, override)


def test_a_frozen_run_has_the_origin_of_each_value_of_its_spec(spec: Path, home: Home) -> None:
    document = load_document(spec, ["training.steps=3"])
    (run,) = make_plan(document, home).runs
    register_run(home, document, run)
    origins = {row["name"]: row for row in provenance_rows(home.root, home.run(run.run_id))}
    assert origins["training.steps"] == {
        **{"run_id": run.run_id, "kind": "spec", "name": "training.steps", "value": "3", "origin": "set"},
    }
    place = {"origin": "file", "file": str(spec), "line": 9}
    assert place.items() <= origins["objective.kl_coef"].items()
    resolved = flatten(run.experiment.model_dump(mode="json", exclude={"matrix"}))
    assert all(any(path == name or path.startswith(f"{name}.") for name in origins) for path in resolved)


def test_a_warm_up_makes_the_base_model_depend_on_the_training_problems(spec: Path, home: Home) -> None:
    spec.write_text(SPEC + "warm_up: {steps: 3}\n")
    assert "base" in changed(spec, home, "data.train.0.size=60")
    assert "base" not in changed(spec, home, "data.evaluation.0.size=30")


def test_dropping_overlap_makes_training_depend_on_the_evaluation_sets(spec: Path, home: Home) -> None:
    overlap = "data.overlap=drop"
    before = fingerprints(spec, home, overlap)
    after = fingerprints(spec, home, overlap, "data.evaluation.0.size=30")
    assert before["train"] != after["train"]


def test_a_data_file_enters_by_its_content(tmp_path: Path, home: Home) -> None:
    text = SPEC.replace("{source: reasoning_gym, task: chain_sum, size: 50, seed: 1}", "{source: jsonl, path: a.jsonl}")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    spec = tmp_path / "file.yaml"
    spec.write_text(text)
    moved = "data.train.0.path=" + str(tmp_path / "b.jsonl")
    before = fingerprints(spec, home)
    assert fingerprints(spec, home, moved) == before
    (tmp_path / "b.jsonl").write_text('{"prompt": "2", "answer": "1"}\n')
    assert fingerprints(spec, home, moved)["data"] != before["data"]


def test_an_unserialisable_identity_raises() -> None:
    with pytest.raises(TypeError):
        fingerprint("data", {"x": object()}, {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint("data", {"x": float("nan")}, {})


def test_flatten_names_every_leaf_by_its_path() -> None:
    assert flatten({"a": {"b": [1, {"c": 2}]}, "d": {}}) == {"a.b.0": 1, "a.b.1.c": 2, "d": {}}


def test_a_first_plan_runs_everything_and_changes_nothing(spec: Path, home: Home) -> None:
    stages = planned(spec, home).runs[0].stages
    assert [(stage.stage, stage.action, stage.reason) for stage in stages] == [
        (name, "RUN", "new") for name in ("data", "base", "train", "evaluate", "report")
    ]
    assert not home.root.exists()


def test_a_change_that_the_matrix_makes_names_the_matrixs_line(spec: Path, home: Home) -> None:
    matrix = "matrix:\n  product:\n    objective.kl_coef: [0.01]\n    training.optimizer.weight_decay: [0.0]\n"
    spec.write_text(SPEC + matrix)
    finish(planned(spec, home).runs[0], home)
    spec.write_text(SPEC + matrix.replace("[0.01]", "[0.01, 0.5]").replace("[0.0]", "[0.25]"))
    line = len(SPEC.splitlines()) + 3
    reasons = [run.stage("train").reason for run in planned(spec, home).runs]
    decays = f"training.optimizer.weight_decay 0 -> 0.25 (tiny.yaml:{line + 1})"
    assert reasons == [decays, f"objective.kl_coef 0.01 -> 0.5 (tiny.yaml:{line}); {decays}"]


def test_what_is_finished_is_cached_and_a_change_names_its_line(spec: Path, home: Home) -> None:
    finish(planned(spec, home).runs[0], home)
    assert {stage.action for stage in planned(spec, home).runs[0].stages} == {"CACHED"}
    spec.write_text(SPEC.replace("samples_per_problem: 4", "samples_per_problem: 6"))
    run = planned(spec, home).runs[0]
    assert [stage.action for stage in run.stages] == ["CACHED", "CACHED", "CACHED", "RUN", "RUN"]
    assert run.stage("evaluate").reason == "evaluation.samples_per_problem 4 -> 6 (tiny.yaml:16)"
    assert run.stage("report").reason == "evaluate changed"


def test_a_change_is_told_against_the_nearest_run_and_a_default_has_no_line(spec: Path, home: Home) -> None:
    runs = [planned(spec, home, *overrides).runs[0] for overrides in ((), ("training.epochs=3",))]
    for run in runs:
        finish(run, home)
    (home.experiment("tiny") / "experiment.json").write_text(json.dumps({"runs": [run.run_id for run in runs]}))
    reason = planned(spec, home, "rollout.temperature=0.5").runs[0].stage("train").reason
    assert reason == "rollout.temperature 1 -> 0.5 (--set)", "the first of the two runs is nearer"
    spec.write_text(SPEC.replace(", kl_coef: 1.0e-2", ""))
    assert planned(spec, home).runs[0].stage("train").reason == "objective.kl_coef 0.01 -> 0.0001 (default)"


def test_a_plan_begins_with_the_changes_and_ends_its_lines_with_hashes(
    spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    finish(planned(spec, home).runs[0], home)
    job = load(spec, set={"objective.kl_coef": 1, "seeds": [0, 1]})
    (run, _), text = job.plan().plan.runs, str(job.plan())
    assert text.startswith("changed  objective.kl_coef 0.01 -> 1 (--set)\n\ntiny  \n")
    lines = [line.split() for line in text.splitlines() if line.startswith(("  data ", "  train "))]
    assert lines[0] == ["data", "CACHED", "done", run.stage("data").fingerprint[:8]]
    assert lines[1][-1] == run.stage("train").fingerprint[:8]
    assert not str(load(spec).plan()).startswith("changed")


def test_a_damaged_result_is_made_again(spec: Path, home: Home) -> None:
    run = planned(spec, home).runs[0]
    finish(run, home)
    (run.stage("base").output / "result").write_text("123")
    stage = planned(spec, home).runs[0].stage("base")
    assert (stage.action, stage.reason) == ("RUN", "its result is damaged: result has 3 bytes instead of 5")


def test_one_flipped_byte_is_damage_and_the_report_of_what_runs_again_runs_too(spec: Path, home: Home) -> None:
    run = planned(spec, home).runs[0]
    finish(run, home)
    (run.stage("evaluate").output / "result").write_text("12346")
    stages = {stage.stage: (stage.action, stage.reason) for stage in planned(spec, home).runs[0].stages}
    assert stages["evaluate"] == ("RUN", "its result is damaged: result does not match its digest")
    assert stages["report"] == ("RUN", "evaluate will run")
    assert stages["train"] == ("CACHED", "done")


def test_a_page_older_than_the_results_it_shows_is_written_again(spec: Path, home: Home) -> None:
    run = planned(spec, home).runs[0]
    finish(run, home)
    path = home.run(run.run_id) / "state.json"
    state = json.loads(path.read_text())
    state["stages"]["report"]["ended_at"] = "2026-11-20T09:30:00.000+00:00"
    state["stages"]["evaluate"]["ended_at"] = "2026-11-20T09:30:00.001+00:00"
    path.write_text(json.dumps(state))
    stage = planned(spec, home).runs[0].stage("report")
    assert (stage.action, stage.reason) == ("RUN", "not finished before")


def test_an_unfinished_training_goes_on_from_its_checkpoint(spec: Path, home: Home) -> None:
    run = planned(spec, home).runs[0]
    (home.run(run.run_id) / "checkpoints" / "step-000010").mkdir(parents=True)
    stage = planned(spec, home).runs[0].stage("train")
    assert (stage.action, stage.reason) == ("RESUME", "continues from step-000010")


def test_each_cell_and_seed_is_a_run_of_its_own(spec: Path, home: Home) -> None:
    spec.write_text(SPEC + "seeds: [0, 1]\nmatrix: {product: {evaluation.temperature: [0.5, 1.0]}}\n")
    runs = planned(spec, home).runs
    assert len({run.run_id for run in runs}) == len(runs) == 4
    assert runs[0].name == "evaluation.temperature=0.5 seed 0"
    assert len({run.stage("base").output for run in runs}) == 1


def test_a_run_planned_by_itself_is_planned_as_among_the_others(spec: Path, home: Home) -> None:
    spec.write_text(SPEC + "seeds: [0, 1]\n")
    document = load_document(spec)
    for run in make_plan(document, home).runs:
        assert plan_run(document, run.run_id, home) == run
    with pytest.raises(SpecError, match="the spec gives other runs here"):
        plan_run(document, "tiny-s0-00000000", home)


def test_a_model_directory_is_the_same_model_with_the_notes_of_its_verification(tmp_path: Path) -> None:
    spec = tmp_path / "pretrained.yaml"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    text = SPEC.replace(SPEC.splitlines()[1], f"model: {{source: pretrained, path: {model}}}")
    spec.write_text(text)
    before = base_identity(load_document(spec).experiment)
    (model / NOTES).write_text("{}")
    assert base_identity(load_document(spec).experiment) == before


def test_a_measured_change_keeps_the_run(spec: Path, home: Home) -> None:
    before = planned(spec, home).runs[0].run_id
    assert planned(spec, home, "evaluation.temperature=0.5").runs[0].run_id == before
    assert planned(spec, home, "training.steps=3").runs[0].run_id != before


def test_identity_of_data_holds_no_path(spec: Path) -> None:
    identity = data_identity(load_document(spec).experiment)
    assert not any(isinstance(value, str) and value.startswith("/") for value in identity.values())


def test_of_many_changes_the_first_are_named_and_the_rest_counted(spec: Path, home: Home) -> None:
    finish(planned(spec, home).runs[0], home)
    overrides = ("training.steps=9", "training.epochs=2", "objective.kl_coef=1", "rollout.temperature=0.5")
    reason = planned(spec, home, *overrides).runs[0].stage("train").reason
    assert reason.count("->") == 3
    assert reason.startswith("objective.kl_coef 0.01 -> 1 (--set); ")
    assert reason.endswith("; and 1 more")


def test_what_is_measured_depends_on_the_environment(spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    assert changed(spec, home, "rollout.rollouter={type: single_turn}") == set()
    two_turns = "rollout.rollouter={type: check_again}"
    assert changed(spec, home, two_turns) == {"train", "evaluate", "report"}
    identity = evaluate_identity(planned(spec, home, two_turns).runs[0].experiment)
    assert identity["rollout.rollouter.type"] == "check_again (rpg-check-again 1.0)"


def test_values_that_change_over_training_are_shown_in_a_line_each(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    ramp = "objective.clip={type: dual, low: {schedule: [[1, 0.1], [2, 0.3]], between: linear}}"
    axis = "matrix.product.objective.kl_coef=[0.1, {schedule: [[1, 0.1], [2, 0.2]]}]"
    arguments = ["plan", str(spec), "--set", ramp, "--set", axis]
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert [line for line in lines if line.startswith("changes")] == [
        "changes objective.clip.low 0.1 -> 0.3 (linear, steps 1, 2)",
        "changes objective.kl_coef 0.1 -> 0.2 (held, steps 1, 2)",
    ]
    plain, changing = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["runs"]
    assert plain["schedules"] == {"objective.clip.low": "0.1 -> 0.3 (linear, steps 1, 2)"}
    assert changing["schedules"].keys() == {"objective.kl_coef", "objective.clip.low"}
    assert not any("changes" in line for line in CliRunner().invoke(app, ["plan", str(spec)]).stdout.splitlines())


def test_a_gpu_that_is_asked_for_trains_in_bfloat16_and_nothing_else_changes_a_fingerprint(
    spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def precision(*overrides: str) -> str:
        return planned(spec, home, *overrides).runs[0].experiment.training.precision

    plain = fingerprints(spec, home)
    assert precision("resources.device=cuda") == "bfloat16"
    assert precision("resources.device=cuda", "training.precision=float32") == "float32"
    assert fingerprints(spec, home, "resources.device=cuda", "training.precision=float32") == plain
    assert fingerprints(spec, home, "resources.device=cuda") == fingerprints(spec, home, "training.precision=bfloat16")
    assert (
        fingerprints(spec, home, "resources.device=auto") == fingerprints(spec, home, "resources.device=cpu") == plain
    )
    monkeypatch.setenv("RPG_SLOTS", "0,1")
    assert fingerprints(spec, home) == plain, "a machine with GPUs"
    again = planned(spec, home, "resources.device=cuda").runs[0].experiment.model_dump(mode="json")
    assert Experiment.model_validate(again).training.precision == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "slots", "warns"),
    [
        ((), "", False),
        ((), "0,1", True),
        (("training.precision=bfloat16",), "0,1", False),
        (("resources.device=cpu",), "0,1", False),
        (("resources.device=cuda",), "", False),
        (("resources.device=cuda", "training.precision=float32"), "", True),
        (("launcher={type: slurm}",), "0,1", False),
    ],
)
def test_float32_is_warned_of_where_a_gpu_will_train(
    spec: Path, home: Home, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], slots: str, warns: bool
) -> None:
    monkeypatch.setenv("RPG_SLOTS", slots)
    warnings = precision_warnings(planned(spec, home, *overrides).runs[0].experiment)
    assert bool(warnings) == warns
    assert all("15 times" in warning.hint for warning in warnings)


def test_a_sets_own_reward_belongs_to_the_stages_that_score_the_set(spec: Path, home: Home) -> None:
    trained = "data.train.0.reward={type: math_dapo}"
    measured = "data.evaluation.0.reward={type: math_dapo}"
    assert changed(spec, home, trained) == {"train", "evaluate", "report"}
    assert changed(spec, home, measured) == {"evaluate", "report"}
    both = ("evaluation.every_steps=1", measured)
    before = fingerprints(spec, home, both[0])
    after = fingerprints(spec, home, *both)
    assert {stage for stage in before if before[stage] != after[stage]} == {"train", "evaluate", "report"}
    other = fingerprints(spec, home, "data.evaluation.0.reward={type: math_dapo, overlong: {buffer: 4}}")
    assert other["evaluate"] != fingerprints(spec, home, measured)["evaluate"]


def test_how_long_a_sets_own_reward_may_take_belongs_to_no_stage(spec: Path, home: Home) -> None:
    own = fingerprints(spec, home, "data.train.0.reward={type: exact_match}")
    assert own == fingerprints(spec, home, "data.train.0.reward={type: exact_match, timeout_seconds: 3}")
