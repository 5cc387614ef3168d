"""Two commands at one experiment: each takes the work that the other leaves, and waits for the rest."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from live import SPEC
from places import ROOT

from pipelines.cli.answer import more_steps, next_lines
from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.prefect.flows.experiment import Outcomes, RunOutcome, execute_plan, next_run, wait_for_another
from pipelines.processes.stop import Stop
from pipelines.running.progress import Silent
from pipelines.running.run import register_experiment, register_runs
from specs.document import Document
from specs.loader import load_document, load_evaluation
from specs.machine.lease import Lease, acquire


class Notes(Silent):
    """Keeps the notes that a command would print."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path / "home")


def planned(home: Home, *overrides: str) -> tuple[Document, list[RunPlan]]:
    Path("my spec.yaml").write_text(SPEC)
    document = load_document("my spec.yaml", overrides)
    return document, list(make_plan(document, home).runs)


def executed(home: Home, run: RunPlan) -> Lease:
    """Another command's hold on a run."""
    lease = acquire(home.run(run.run_id))
    RunState(home, run.run_id, lease.fence).update(status="running")
    return lease


def test_a_run_that_another_command_executes_is_left_to_the_end(home: Home) -> None:
    _, runs = planned(home, "seeds=[0, 1]")
    left = list(enumerate(runs, start=1))
    assert next_run(left, home) == left[0]
    with executed(home, runs[0]):
        assert next_run(left, home) == left[1]
        with executed(home, runs[1]):
            assert next_run(left, home) == left[0]


@pytest.mark.parametrize(
    ("status", "reason", "given_up"),
    [
        ("finished", "", False),
        ("cancelled", "train: interrupted by SIGINT", False),
        ("cancelled", "train: cancelled", True),
    ],
)
def test_the_end_of_another_commands_run_is_waited_for(home: Home, status: str, reason: str, given_up: bool) -> None:
    _, (run,) = planned(home)
    lease, told = executed(home, run), Notes()

    def end() -> None:
        time.sleep(0.3)
        RunState(home, run.run_id, lease.fence).update(status=status, reason=reason)
        lease.release()

    threading.Thread(target=end).start()
    assert wait_for_another(home, run.run_id, told, Stop()) == given_up
    assert RunState(home, run.run_id).status == status
    assert told.notes == [
        f"  another command executes it: waiting; `rpg watch {run.run_id}` shows its progress",
    ]


def test_a_run_that_nobody_executes_is_not_waited_for(home: Home) -> None:
    _, (run,) = planned(home)
    told = Notes()
    assert not wait_for_another(home, run.run_id, told, Stop())
    assert told.notes == []


def test_what_is_proposed_next_repeats_the_settings_in_any_shells_quotes(home: Home) -> None:
    settings = ("training.steps=3", "matrix.product.objective.kl_coef=[0, 1]")
    document, runs = planned(home, *settings)
    lines = next_lines(document, [RunOutcome(runs[0], "finished")])
    given = "'my spec.yaml' --set training.steps=3 --set 'matrix.product.objective.kl_coef=[0, 1]'"
    assert lines[2].startswith(f"  rpg run {given} --set 'seeds=[0,1,2]'  ")


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (("seeds=[5]",), ""),
        (("seeds=[5]", "training.steps=3", "seeds=[6]", "seeds.0=7"), "--set training.steps=3 "),
        (("training.steps=2", "training.steps=3"), "--set training.steps=3 "),
    ],
)
def test_what_is_proposed_next_sets_each_field_once(home: Home, settings: tuple[str, ...], given: str) -> None:
    document, runs = planned(home, *settings)
    lines = next_lines(document, [RunOutcome(runs[0], "finished")])
    assert lines[2].startswith(f"  rpg run 'my spec.yaml' {given}--set 'seeds=[0,1,2]'  ")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("training.epochs=1", "more steps, continuing from step 6"),
        ("training.schedule.type=cosine", "more steps, from the start: the rate of a cosine schedule at each step "),
    ],
)
def test_more_steps_are_proposed_after_training_with_where_they_begin(home: Home, setting: str, why: str) -> None:
    document, runs = planned(home, setting)
    assert f"  rpg run 'my spec.yaml' --set {setting} --set training.steps=12  {why}" in "\n".join(
        next_lines(document, [RunOutcome(runs[0], "finished")])
    )
    assert "training.steps=12" not in "".join(next_lines(document, [RunOutcome(runs[0], "failed")]))


def test_more_steps_are_not_proposed_if_the_matrix_says_how_many(home: Home) -> None:
    document, runs = planned(home, "matrix.product={training.steps: [2, 4]}")
    assert more_steps(document) is None
    assert not any("training.steps=12" in line for line in next_lines(document, [RunOutcome(runs[0], "finished")]))


def test_resuming_finished_runs_says_how_to_train_more_steps(
    home: Home, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(home.root))
    document, runs = planned(home, "seeds=[0, 1]")
    register_experiment(home, document, tuple(runs))
    register_runs(home, document, runs, durable=False)
    for run in runs:
        with executed(home, run) as lease:
            RunState(home, run.run_id, lease.fence).update(status="finished")
    told = "".join(f"{run.run_id} is finished\n" for run in runs)
    hint = "more steps, continuing from step 6: `rpg run 'my spec.yaml' --set 'seeds=[0, 1]' --set training.steps=12`"
    assert call("resume", "tiny") == (0, "", f"{told}  hint: {hint}\n")


def test_a_comparison_is_proposed_of_settings_and_not_of_seeds(home: Home) -> None:
    for override, proposed in (("seeds=[0, 1]", False), ("matrix.product={objective.kl_coef: [0, 1]}", True)):
        document, runs = planned(home, override)
        lines = next_lines(document, [RunOutcome(run, "finished") for run in runs])
        assert any(line.startswith("  rpg compare tiny  ") for line in lines) == proposed, lines
        assert not any("seeds=[0,1,2]" in line for line in lines)


def test_a_matrix_is_run_seed_by_seed_over_all_cells(home: Home) -> None:
    settings = ("seeds=[3, 1]", "matrix.product={objective.kl_coef: [0, 1, 2]}")
    document, runs = planned(home, *settings)
    begun: list[tuple[int, float]] = []

    def execute(in_turn: Sequence[RunPlan]) -> Outcomes:
        for run in in_turn:
            begun.append((run.seed, run.values["objective.kl_coef"]))
            yield RunOutcome(run, "cancelled")

    outcomes = execute_plan(make_plan(document, home), home, execute)
    assert begun == [(3, 0), (3, 1), (3, 2), (1, 0), (1, 1), (1, 2)]
    assert [outcome.run for outcome in outcomes] == runs, "they are listed as the file has them"


def test_after_an_interrupted_matrix_the_experiments_command_is_next_and_after_a_single_run_its_own(home: Home) -> None:
    document, runs = planned(home, "matrix.product={objective.kl_coef: [0, 1]}")
    outcomes = [RunOutcome(runs[0], "finished"), RunOutcome(runs[1], "cancelled", interrupted=True)]
    lines = next_lines(document, outcomes)
    assert lines[2].startswith("  rpg run 'my spec.yaml' --set 'matrix.product={objective.kl_coef: [0, 1]}'  ")
    assert not any("rpg resume" in line for line in lines)
    assert f"  rpg resume {runs[1].run_id}  " in next_lines(document, outcomes[1:], single=True)[2]
    document, (run,) = planned(home)
    assert f"  rpg resume {run.run_id}  " in next_lines(document, [RunOutcome(run, "cancelled", interrupted=True)])[2]


def test_more_samples_are_proposed_only_where_answers_vary(home: Home) -> None:
    for temperature, proposed in (("1.0", "--set evaluation.samples_per_problem=..."), ("0", "add problems to")):
        settings = [f"evaluation.temperature={temperature}", "evaluation.samples_per_problem=1"]
        document = load_evaluation(ROOT / "specs/evaluations/chance.yaml", settings)
        run = make_plan(document, home).runs[0]
        assert proposed in next_lines(document, [RunOutcome(run, "finished")])[-1]
