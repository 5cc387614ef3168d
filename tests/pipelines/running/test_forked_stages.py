"""Stages whose processes are forks give, bit for bit, what new processes give."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import SIGNAL, SPEC, Lab, wait_for
from safetensors.torch import load_file


def left_by(lab: Lab) -> dict[str, Any]:
    """What an experiment has left: weights, tokens, answers of its evaluation, and the metrics that are no time."""
    run_id = lab.run_ids()[-1]
    (weights,) = sorted(lab.home.run(run_id).glob("weights/step-*"))[-1].glob("*.safetensors")
    tables = {
        "tokens": "SELECT * EXCLUDE (run_id) FROM tokens ORDER BY ALL",
        "samples": "SELECT * EXCLUDE (run_id) FROM evaluation_samples ORDER BY ALL",
        "metrics": "SELECT step, name, value FROM metrics"
        " WHERE name NOT LIKE '%second%' AND name NOT LIKE '%memory%' ORDER BY ALL",
    }
    rows = {name: [[repr(value) for value in row] for row in lab.query(sql)] for name, sql in tables.items()}
    return {"weights": {name: value.tolist() for name, value in load_file(weights).items()}, **rows}


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[list[Lab]]:
    made = [Lab(tmp_path / name, tmp_path / "tiny.yaml") for name in ("forks", "new")]
    yield made
    for lab in made:
        lab.clean_up()


def test_forks_give_what_new_processes_give(labs: list[Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    for lab, forks in zip(labs, ("1", "0"), strict=True):
        lab.spec.write_text(SPEC)
        monkeypatch.setenv("RPG_FORK_STAGES", forks)
        # Two runs of one command: the second one's stages are forks of a process that the first one's were forks of.
        overrides = (*SIGNAL, "training.steps=2", "seeds=[0, 1]")
        result = lab.rpg("run", str(lab.spec), overrides=overrides, timeout=500)
        assert result.code == 0, result.err
        lab.assert_trained(lab.run_ids()[-1])
    forked, new = map(left_by, labs)
    assert forked["tokens"]
    assert forked["samples"]
    assert forked == new


def test_a_signal_ends_a_command_its_forks_and_what_they_are_forks_of(lab: Lab) -> None:
    command = lab.start("run", str(lab.spec), overrides=("training.steps=100000",))
    try:
        wait_for(lambda: [run for run in lab.run_ids() if lab.progress(run) > 1], timeout=400)
        words = [" ".join(process.cmdline()) for process in lab.processes()]
        assert any("fork_server" in each for each in words)
        assert not any("start_ranks" in each for each in words)
    finally:
        command.terminate()
    command.communicate(timeout=400)
    assert lab.processes() == []
