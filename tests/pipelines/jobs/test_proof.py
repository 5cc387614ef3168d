"""`rpg resume --prove`: a run's steps repeated from a checkpoint and compared with the record."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specs.segment_names import content_digest, parse_segment_name

OVERRIDES = ("training.steps=6", "training.checkpoint.every_steps=2", "training.checkpoint.keep_last=3")


@pytest.mark.long
def test_a_run_is_proven_and_a_record_that_was_tampered_with_is_not(lab):
    result = lab.rpg("run", str(lab.spec), overrides=OVERRIDES)
    assert result.code == 0, result.err
    (run_id,) = lab.run_ids()

    proven = lab.rpg("resume", run_id, "--prove")
    assert proven.code == 0, proven.out + proven.err
    assert f"{run_id}: steps 5 to 6 again from the checkpoint of step 4" in proven.out
    assert "32 rollouts" in proven.out
    assert "checkpoint of step 6 (3 files)" in proven.out
    assert "export of step 6" in proven.out
    assert proven.out.rstrip().endswith("the same in every bit")
    assert list((lab.root / "proofs").iterdir()) == []
    assert lab.query("select count(*) from rollouts") == [(6 * 16,)], "the replay left nothing in the record"

    change_reward(lab.home.run(run_id) / "segments" / "rollouts", step=3, rollout_id=5)
    shutil.rmtree(lab.root / "proofs")
    refuted = lab.rpg("resume", run_id, "--prove", "--steps", "4")
    assert refuted.code == 1, refuted.out + refuted.err
    assert "steps 3 to 6 again from the checkpoint of step 2" in refuted.out
    assert "1 difference\n  rollouts: reward differs in 1 rows, first at step 3, rollout_id 5: " in refuted.out

    beyond = lab.rpg("resume", run_id, "--prove", "--steps", "7")
    assert beyond.code == 2
    assert "has fewer steps" in beyond.err


def change_reward(segments: Path, *, step: int, rollout_id: int) -> None:
    """Forges the file that holds a table's rows, and gives it the name that goes with its new content."""
    (file,) = segments.glob("c*.parquet")
    name = parse_segment_name(file.name)
    table = pq.read_table(file)
    rewards = table.column("reward").to_pylist()
    responses = zip(table.column("step").to_pylist(), table.column("rollout_id").to_pylist(), strict=True)
    rewards[list(responses).index((step, rollout_id))] += 1e-9
    column = table.schema.get_field_index("reward")
    file.unlink()
    pq.write_table(table.set_column(column, table.schema.field(column), [rewards]), file)
    file.rename(segments / str(replace(name, digest=content_digest(file))))
