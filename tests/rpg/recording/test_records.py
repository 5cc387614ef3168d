"""Segments: whole, typed as the store expects, written once."""

from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rpg.recording.rows import chosen_responses
from rpg.recording.segments import SegmentWriter, schema_of
from specs.machine.files import DiskError
from specs.records import TABLES, MetricRow, RolloutRow, TokenRow
from specs.segment_names import content_digest

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def test_column_types_follow_from_the_annotations() -> None:
    schema = schema_of(TokenRow)
    assert schema.field("position").type == pa.int32()
    assert schema.field("logprob").type == pa.float32()
    assert schema.field("logprob").nullable
    assert not schema.field("sampled").nullable
    assert schema_of(MetricRow).field("value").type == pa.float64()
    assert schema_of(MetricRow).field("recorded_at").type == pa.timestamp("us", tz="UTC")
    assert schema_of(RolloutRow).field("reward_error").nullable
    assert all(schema_of(row).names for row in TABLES.values())


def test_rows_come_back_as_they_were_added(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "run", 3)
    for step in (7, 8):
        values = {"step": step, "name": ["a", "b"], "value": np.array([0.1, 1e300]), "recorded_at": NOW}
        writer.columns(MetricRow, values)
    writer.flush()
    (file,) = (tmp_path / "segments" / "metrics").iterdir()
    assert file.name == f"a0003-s000007-000008-{content_digest(file)}.parquet"
    table = pq.read_table(file)
    assert table.schema.equals(schema_of(MetricRow))
    assert table.to_pylist()[3] == {
        **{"run_id": "run", "attempt": 3, "step": 8, "name": "b", "value": 1e300, "recorded_at": NOW}
    }


def test_nothing_is_on_disk_before_the_flush_and_nothing_is_written_twice(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "run", 1)
    writer.event(2, "started", "now")
    assert not (tmp_path / "segments").exists()
    writer.flush()
    writer.flush()
    writer.event(2, "started", "again")
    with pytest.raises(FileExistsError, match="a segment is never changed"):
        writer.flush()


def test_a_half_written_segment_has_no_name_that_a_reader_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_table: object, file: BinaryIO, **_options: object) -> None:
        file.write(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", dies)
    writer = SegmentWriter(tmp_path, "run", 1)
    writer.event(1, "started", "")
    with pytest.raises(DiskError, match="no space is left on the device"):
        writer.flush()
    assert list((tmp_path / "segments" / "events").iterdir()) == []


def test_the_choice_of_responses_follows_from_run_step_and_share_alone() -> None:
    chosen = chosen_responses("run", 3, 64, 0.1)
    assert chosen.sum() == 7, "a tenth of 64, rounded up"
    assert (chosen == chosen_responses("run", 3, 64, 0.1)).all()
    assert (chosen != chosen_responses("run", 4, 64, 0.1)).any()
    assert (chosen != chosen_responses("other", 3, 64, 0.1)).any()
    assert (chosen <= chosen_responses("run", 3, 64, 0.5)).all(), "a larger share holds the smaller one"
    assert chosen_responses("run", 3, 64, 1.0).all()
    counts = sum(chosen_responses("run", step, 8, 0.25).astype(int) for step in range(400))
    assert 60 < counts.min() <= counts.max() < 140, "no place in the batch is preferred"
