"""An experiment executed until a step, paused, and gone on with: on record, for Prefect and in SQL."""

import json
import subprocess
from typing import Any

import pytest
from live import SIGNAL, Lab, finished

from specs.machine.files import digest

STEPS = "training.steps=8"
PROGRAM = """
import json, sys
from pathlib import Path
from pipelines.home.home import Home
from pipelines.prefect.flows.experiment import execute_experiment
from pipelines.prefect.server.api import Api
from specs.loader import load_document

spec, until, overrides = sys.argv[1], int(sys.argv[2]), tuple(sys.argv[3:])
home = Home.from_environment()
home.root.mkdir(parents=True, exist_ok=True)
with Api(home) as api, api.connected():
    outcomes = execute_experiment(load_document(Path(spec), overrides), home, until=until)
print(json.dumps([[outcome.status, outcome.paused_at] for outcome in outcomes]))
"""


def start_until(lab: Lab, step: int, *overrides: str) -> subprocess.Popen[str]:
    return lab.start_program(PROGRAM, str(lab.spec), str(step), STEPS, *SIGNAL, *overrides)


def execute_until(lab: Lab, step: int, *overrides: str) -> list[Any]:
    """(status, step at which it paused) of the only run."""
    result = finished(start_until(lab, step, *overrides))
    assert result.code == 0, result.err
    (outcome,) = json.loads(result.out.splitlines()[-1])
    return list(outcome)


def trainers(lab: Lab) -> int:
    """How many trainers were started."""
    return len(list(lab.root.glob("runs/*/attempts/*.json")))


def weights_digest(lab: Lab, run_id: str) -> str:
    return digest(lab.home.run(run_id) / "weights" / "step-000008" / "model.safetensors")


@pytest.mark.long
def test_a_run_pauses_where_it_is_told_to_and_goes_on_to_the_weights_of_an_uninterrupted_one(lab: Lab) -> None:
    assert execute_until(lab, 4) == ["paused", 4]
    (run_id,) = lab.run_ids()
    state = lab.state(run_id)
    assert (state["status"], state["reason"]) == ("cancelled", "paused at step 4")
    assert (state["stages"]["train"]["status"], "evaluate" in state["stages"]) == ("cancelled", False)
    assert lab.query("select step, num_problems from evaluations where metric = 'mean@2'") == [(4, 10)]
    assert lab.query("select step, count(*) from evaluation_samples group by step") == [(4, 20)]
    for table in ("task_run", "flow_run"):
        newest = f"select state_type, state_name from {table} order by expected_start_time desc limit 1"
        assert lab.prefect_rows(newest) == [("COMPLETED", "Paused")]

    assert execute_until(lab, 4) == ["paused", 4]
    assert execute_until(lab, 2) == ["paused", 4]
    assert trainers(lab) == 1, "it stood there already"

    assert execute_until(lab, 6) == ["paused", 6]
    assert execute_until(lab, 8) == ["finished", 0]
    assert lab.state(run_id)["status"] == "finished"
    attempts = [json.loads(path.read_text()) for path in sorted(lab.root.glob("runs/*/attempts/*.json"))]
    assert [attempt["resumed_from_step"] for attempt in attempts] == [0, 4, 6]
    measured = lab.query("select step, count(*) from evaluation_samples group by step order by step")
    assert measured == [(0, 20), (4, 20), (6, 20), (8, 20)]
    lab.assert_trained(run_id)
    paused = weights_digest(lab, run_id)

    lab.home.run(run_id).rename(lab.root / "aside")
    result = lab.rpg("run", str(lab.spec), overrides=(STEPS, *SIGNAL))
    assert result.code == 0, result.err
    assert weights_digest(lab, run_id) == paused
