"""Stages whose processes are forks give, bit for bit, what new processes give."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import SIGNAL, Lab, copy_prefect_database
from safetensors.torch import load_file
from waiting import wait_for


def left_by(lab: Lab) -> dict[str, Any]:
    """What an experiment has left: weights, tokens, answers of its evaluation, and the metrics that are no time."""
    run_id = lab.run_ids()[-1]
    (weights,) = sorted(lab.home.run(run_id).glob("weights/step-*"))[-1].glob("*.safetensors")
    tables = {
        "tokens": "SELECT * EXCLUDE (run_id) FROM tokens WHERE run_id = '{run}' ORDER BY ALL",
        "samples": "SELECT * EXCLUDE (run_id) FROM evaluation_samples WHERE run_id = '{run}' ORDER BY ALL",
        "metrics": "SELECT step, name, value FROM metrics"
        " WHERE run_id = '{run}' AND name NOT LIKE 'time/%'"
        " AND name NOT LIKE '%second%' AND name NOT LIKE '%memory%' ORDER BY ALL",
    }
    rows = {
        name: [[repr(value) for value in row] for row in lab.query(sql.replace("{run}", run_id))]
        for name, sql in tables.items()
    }
    return {"weights": {name: value.tolist() for name, value in load_file(weights).items()}, **rows}


@pytest.fixture
def other(prepared_home: Path, lab: Lab, tmp_path: Path) -> Iterator[Lab]:
    """Another home like the lab's."""
    other = Lab(tmp_path / "other", lab.spec)
    shutil.copytree(prepared_home / "artifacts", other.root / "artifacts")
    copy_prefect_database(prepared_home, other.root)
    yield other
    other.clean_up()


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_forks_give_what_new_processes_give(lab: Lab, other: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that is compared is the second of its command, whose stages are forks after other forks."""
    few = (*SIGNAL, "training.steps=2", "evaluation.checkpoints=final")
    for each, forks, seeds in ((lab, "1", "seeds=[0, 1]"), (other, "0", "seeds=[1]")):
        monkeypatch.setenv("RPG_FORK_STAGES", forks)
        result = each.rpg("run", str(each.spec), overrides=(*few, seeds), anew=True, timeout=1000)
        assert result.code == 0, result.err
        each.assert_trained(each.run_ids()[-1])
    assert lab.run_ids()[-1:] == other.run_ids()
    forked, new = left_by(lab), left_by(other)
    assert forked["tokens"]
    assert forked["samples"]
    assert forked == new


@pytest.mark.more
def test_a_signal_ends_a_command_its_forks_and_what_they_are_forks_of(lab: Lab) -> None:
    command = lab.start("run", str(lab.spec), overrides=("training.steps=100000",), anew=True)
    try:
        wait_for(lambda: [run for run in lab.run_ids() if lab.progress(run) > 1], timeout=400)
        words = [" ".join(process.cmdline()) for process in lab.processes()]
        assert any("fork_server" in each for each in words)
        assert not any("start_ranks" in each for each in words)
    finally:
        command.terminate()
    command.communicate(timeout=400)
    assert lab.processes() == []
