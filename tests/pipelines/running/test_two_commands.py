"""Two commands at one experiment: each takes what the other leaves, and waits for the rest."""

import threading
import time
from pathlib import Path

import pytest
from live import SPEC

from pipelines.cli.answer import next_lines
from pipelines.home.home import Home
from pipelines.home.state import RunState
from pipelines.planning.plan import RunPlan, make_plan
from pipelines.prefect_flows.experiment import RunOutcome, next_run, wait_for_another
from pipelines.processes.stop import Stop
from pipelines.running.progress import Silent
from specs.document import Document
from specs.loader import load_document
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
    document, runs = planned(home, "training.steps=3")
    lines = next_lines(document, [RunOutcome(runs[0], "finished")], settings)
    given = "'my spec.yaml' --set training.steps=3 --set 'matrix.product.objective.kl_coef=[0, 1]'"
    assert lines[2].startswith(f"  rpg run {given} --set 'seeds=[0,1,2]'  ")


def test_a_comparison_is_proposed_of_settings_and_not_of_seeds(home: Home) -> None:
    for override, proposed in (("seeds=[0, 1]", False), ("matrix.product={objective.kl_coef: [0, 1]}", True)):
        document, runs = planned(home, override)
        lines = next_lines(document, [RunOutcome(run, "finished") for run in runs])
        assert any(line.startswith("  rpg compare tiny  ") for line in lines) == proposed, lines
        assert not any("rpg run " in line for line in lines)
