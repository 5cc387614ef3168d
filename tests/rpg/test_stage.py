"""The stages as processes: their results, and their ends."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from stage_jobs import SPEC, Result, job_of, run_stage

import rpg.stage
from pipelines.launchers.local import local_command
from rpg.evaluation.results import digests_of
from rpg.recording.segments import schema_of
from specs.errors import Issue, SpecError
from specs.machine.fence import SupersededError
from specs.machine.files import files_under
from specs.records import EvaluationRow, EvaluationSampleRow
from tests.rpg.tiny_run import finish, free_port, start


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def data(home: Path) -> Result:
    return run_stage("data", home, SPEC)


@pytest.fixture(scope="module")
def base(home: Path, data: Result) -> Result:
    return run_stage("base", home, SPEC, data=data.out)


@pytest.fixture(scope="module")
def evaluated(home: Path, data: Result, base: Result) -> Result:
    run = home / "run"
    (run / "weights").mkdir(parents=True)
    (run / "weights" / "step-000001").symlink_to(base.out)
    (run / "train.json").write_text(json.dumps({"weights": {"1": "weights/step-000001"}}))
    return run_stage("evaluate", home, SPEC, data=data.out, base=base.out, run=run)


def inputs_of(evaluated: Result) -> dict[str, Path]:
    home = evaluated.out.parent
    return {"data": home / "data", "base": home / "base", "run": home / "run"}


def wrong(job: dict[str, Any]) -> Issue:
    with pytest.raises(SpecError) as caught:
        rpg.stage.run(job)
    (problem,) = caught.value.issues
    return problem


@pytest.mark.more
def test_data_leaves_both_splits_and_plain_log_lines(data: Result) -> None:
    assert (data.code, data.problems) == (0, [])
    assert pq.read_metadata(data.out / "train.parquet").num_rows > 0
    assert pq.read_metadata(data.out / "evaluation.parquet").num_rows > 0
    assert re.fullmatch(
        r"data: started\n"
        r"data\.train\.0: 200 problems of chain_sum, \d+ copies removed, \d+ kept\n"
        r"data\.evaluation\.0: 12 problems of held_out, \d+ copies removed, \d+ kept\n"
        r"data: done in \d+\.\d s\n",
        data.log,
    )


def test_base_leaves_a_model_directory_and_a_summary(base: Result) -> None:
    assert base.code == 0, base.log
    names = {file.name for file in base.out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "summary.json"} <= names
    summary = json.loads((base.out / "summary.json").read_text())
    assert summary["vocabulary"] == 258
    assert summary["context"] == 32
    assert len(summary["warm_up"]["losses"]) == 3
    assert summary["seconds"] > 0


def test_evaluate_leaves_rows_and_a_summary_of_each_checkpoint(evaluated: Result) -> None:
    assert evaluated.code == 0, evaluated.log
    summary = json.loads((evaluated.out / "summary.json").read_text())["checkpoints"]
    assert [(each["step"], each["dataset"]) for each in summary] == [(0, "held_out"), (1, "held_out")]
    drift = {"drift/reverse", "drift/forward", "drift/reverse_response", "drift/forward_response"}
    answers = {"mean@4", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"}
    assert set(summary[0]["metrics"]) == answers | drift
    assert len(summary[0]["problems"]) == summary[0]["num_problems"]
    # The same weights, problems and seeds: the same responses, through load_weights too.
    assert summary[0] == summary[1] | {"step": 0}

    rows = pq.read_table(evaluated.out / "segments" / "evaluations")
    assert rows.schema.equals(schema_of(EvaluationRow))
    assert rows.num_rows == 2 * (7 + 4)
    assert set(rows["fingerprint"].to_pylist()) == {"f" * 64}

    samples = pq.read_table(evaluated.out / "segments" / "evaluation_samples").to_pylist()
    assert set(samples[0]) == set(EvaluationSampleRow.__annotations__)
    assert len(samples) == 2 * 4 * summary[0]["num_problems"]
    assert {row["sample"] for row in samples} == {0, 1, 2, 3}
    means = [row["correct"] for row in samples if row["step"] == 0]
    assert sum(means) / len(means) == pytest.approx(summary[0]["metrics"]["mean@4"]["value"])


@pytest.mark.long
def test_two_ranks_share_the_problems_and_leave_what_one_leaves(tmp_path: Path, evaluated: Result) -> None:
    spec = SPEC | {"training": SPEC["training"] | {"ranks": 2}}
    job = job_of("evaluate", tmp_path, spec, **inputs_of(evaluated))
    (tmp_path / "evaluate-job.json").write_text(json.dumps(job))
    left = tmp_path / "evaluate" / "segments" / "evaluations" / "by-ranks-that-were-lost.parquet"
    left.parent.mkdir(parents=True)
    left.touch()
    output = finish(start(local_command(tmp_path, 2, free_port(), stage="evaluate")))
    summaries = [json.loads((out / "summary.json").read_text()) for out in (tmp_path / "evaluate", evaluated.out)]
    assert summaries[0] == summaries[1]
    assert output.count("evaluate: started") == 1
    assert "6 of 6 problems answered" in output, "the first rank's half of the twelve"
    for table in ("evaluations", "evaluation_samples"):
        shared, alone = (
            pq.read_table(out / "segments" / table).to_pylist() for out in (tmp_path / "evaluate", evaluated.out)
        )
        assert shared == alone


@pytest.mark.more
def test_an_evaluation_that_was_interrupted_goes_on_with_the_answers_that_it_has(
    tmp_path: Path, evaluated: Result
) -> None:
    weights = tmp_path / "run" / "weights" / "step-000001"
    weights.parent.mkdir(parents=True)
    (tmp_path / "run" / "train.json").write_text(json.dumps({"weights": {"1": "weights/step-000001"}}))
    spec = SPEC | {"rollout": SPEC["rollout"] | {"max_concurrent": 1}}  # two of the twelve problems at a time
    inputs = inputs_of(evaluated) | {"run": tmp_path / "run"}
    job = job_of("evaluate", tmp_path, spec, **inputs) | {"kept": str(tmp_path / "kept")}
    with pytest.raises(OSError, match="step-000001"):  # once the base model is measured
        rpg.stage.run(job)
    kept = sorted(tmp_path.glob("kept/*/step-000000-*/*.json"))
    assert len(kept) == 6
    for file in kept[:4]:  # a mark in each batch's first answer, to be seen again
        batch = json.loads(file.read_text())
        batch["answers"][0]["score"]["extracted"] = "kept"
        file.write_text(json.dumps(batch))
    kept[4].write_text('{"answers": [{"resp')
    kept[5].unlink()

    weights.symlink_to(inputs["base"])
    rpg.stage.run(job)
    rows = pq.read_table(tmp_path / "evaluate" / "segments" / "evaluation_samples").to_pylist()
    whole = pq.read_table(evaluated.out / "segments" / "evaluation_samples").to_pylist()
    marked = [index for index, row in enumerate(rows) if row["extracted"] == "kept"]
    assert [rows[index]["step"] for index in marked] == [0] * 4
    for index in marked:
        rows[index]["extracted"] = whole[index]["extracted"]
    assert rows == whole
    assert not (tmp_path / "kept").exists()


@pytest.mark.more
def test_what_was_measured_during_training_is_on_record_at_once_and_taken_as_it_is(
    tmp_path: Path, evaluated: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    exported = {step: run / "weights" / f"step-{step:06}" for step in (1, 2)}
    for path in exported.values():
        shutil.copytree(inputs_of(evaluated)["base"], path)
    weights = {str(step): f"weights/{path.name}" for step, path in exported.items()}
    of_base = digests_of(inputs_of(evaluated)["base"])
    digests = {f"{path}/{name}": digest for path in weights.values() for name, digest in of_base.items()}
    (run / "train.json").write_text(json.dumps({"weights": weights, "files": digests}))
    training = SPEC["training"] | {"steps": 2, "export_every_steps": 1}
    spec = SPEC | {"training": training, "evaluation": {"samples_per_problem": 2, "checkpoints": "all"}}
    inputs = {**inputs_of(evaluated), "run": run}

    def evaluate(out: str) -> dict[str, bytes]:
        rpg.stage.run(job_of("evaluate", tmp_path / out, spec, **inputs))
        directory = tmp_path / out / "evaluate"
        return {str(file.relative_to(directory)): file.read_bytes() for file in files_under(directory)}

    def measure(attempt: int) -> None:
        policies = [(0, inputs["base"]), (1, exported[1])]
        named = [{"step": step, "weights": str(path), "attempt": attempt} for step, path in policies]
        job = job_of("evaluate_exported", tmp_path, spec, **inputs)
        rpg.stage.run(job | {"exported": named, "lease": 0})

    def recorded() -> list[tuple[int, int]]:
        samples = pq.read_table(run / "segments" / "evaluation_samples").to_pylist()
        return sorted({(row["attempt"], row["step"]) for row in samples})

    plain = evaluate("after")
    measure(1)
    assert recorded() == [(1, 0), (1, 1)]
    measure(2)
    assert recorded() == [(1, 0), (1, 1), (2, 0), (2, 1)], "exported again by a later attempt: the same weights"
    capsys.readouterr()
    assert evaluate("during") == plain
    assert [line for line in capsys.readouterr().out.splitlines() if "was measured" in line] == [
        f"step {step}: was measured during training" for step in (0, 1)
    ]
    (run / "train.json").write_text(json.dumps({"weights": weights, "files": dict.fromkeys(digests, "other")}))
    assert evaluate("exported again") == plain
    assert "step 1: was measured" not in capsys.readouterr().out


def test_a_result_is_not_taken_over_by_a_process_that_lost_the_run(tmp_path: Path, evaluated: Result) -> None:
    run = tmp_path / "run"
    (run / "leases").mkdir(parents=True)
    (run / "leases" / "0002.json").touch()
    job = job_of("evaluate_exported", tmp_path, SPEC, **inputs_of(evaluated) | {"run": run})
    base = {"step": 0, "weights": job["inputs"]["base"], "attempt": 1}
    with pytest.raises(SupersededError):
        rpg.stage.run(job | {"exported": [base], "lease": 1})
    assert not (run / "segments").exists()


def test_only_the_final_checkpoint_is_measured_where_that_is_asked_for(tmp_path: Path, evaluated: Result) -> None:
    spec = SPEC | {"evaluation": {"samples_per_problem": 2, "checkpoints": "final", "temperature": 0.0}}
    rpg.stage.run(job_of("evaluate", tmp_path, spec, **inputs_of(evaluated)))
    (summary,) = json.loads((tmp_path / "evaluate" / "summary.json").read_text())["checkpoints"]
    assert summary["step"] == 1
    assert set(summary["problems"].values()) <= {0.0, 1.0}  # greedy: both samples agree


def test_without_evaluation_sets_there_is_nothing_to_measure(tmp_path: Path, evaluated: Result) -> None:
    spec = SPEC | {"data": {**SPEC["data"], "evaluation": []}}
    rpg.stage.run(job_of("data", tmp_path, spec))
    rpg.stage.run(job_of("evaluate", tmp_path, spec, **inputs_of(evaluated) | {"data": tmp_path / "data"}))
    assert json.loads((tmp_path / "evaluate" / "summary.json").read_text()) == {"checkpoints": []}


def test_a_set_that_is_not_there(tmp_path: Path, evaluated: Result) -> None:
    spec = SPEC | {"evaluation": {"datasets": ["heldout"]}}
    assert wrong(job_of("evaluate", tmp_path, spec, **inputs_of(evaluated))) == Issue(
        "no such evaluation set", path=("evaluation", "datasets"), given="heldout", allowed="held_out"
    )


def test_a_context_too_short_for_an_evaluation_prompt(tmp_path: Path, evaluated: Result) -> None:
    spec = SPEC | {"evaluation": {"max_response_length": 30}}
    problem = wrong(job_of("evaluate", tmp_path, spec, **inputs_of(evaluated)))
    assert problem.message == (
        "the model's context is too short for the longest evaluation prompt and a whole response"
    )
    assert problem.path == ("evaluation", "max_response_length")
    assert problem.given.endswith(" + 30 tokens")
    assert problem.allowed == "at most 32 tokens together"
    assert problem.hint == "lower evaluation.max_response_length"


def test_a_users_error_is_listed_and_exits_with_two(tmp_path: Path) -> None:
    spec = SPEC | {"data": {"train": [{"source": "jsonl", "path": "/no/where.jsonl"}]}}
    result = run_stage("data", tmp_path, spec)
    assert result.code == 2
    assert result.problems == [
        {
            "message": "no such file",
            "path": ["data", "train", 0, "path"],
            "given": "/no/where.jsonl",
            "allowed": "",
            "hint": "there is no directory /no",
            "file": "",
            "line": 0,
            "snippet": "",
            "column": 0,
            "within": "",
        }
    ]
    assert result.log == (
        "data: started\ndata: data.train.0.path: no such file\n"
        "  given: /no/where.jsonl\n  hint: there is no directory /no\n"
    )


def test_a_failure_of_ours_is_neither(tmp_path: Path) -> None:
    result = run_stage("train", tmp_path, SPEC)
    assert result.code == 1
    assert result.problems == []
    assert "ValueError: no stage `train`" in result.log
