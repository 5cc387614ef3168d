"""Shares of several ranks: the rows of a step count once all of its ranks have written, and then once."""

from pathlib import Path

import pytest

from rpg.recording.segments import SegmentWriter
from specs.records import RolloutRow, TokenRow
from storage import Store, check
from storage.ingest import ingest
from storage.merging.compaction import compact_run
from tests.storage.recording import RecordedRun, rollout_columns, token_columns


def share(run: RecordedRun, step: int, rank: int, *, ranks: int = 2, count: int = 2, tokens: int = 3) -> None:
    """One rank's responses of a step, on disk: `count` of them, of so many tokens each."""
    writer = SegmentWriter(run.path, run.run_id, run.attempt, rank=rank, ranks=ranks)
    mine = [2 * rank + number for number in range(count)]
    of_each_token = [number for number in mine for _ in range(tokens)]
    writer.columns(RolloutRow, rollout_columns(step, count, tokens, 0.5) | {"step": step, "rollout_id": mine})
    writer.columns(TokenRow, token_columns(step, count, tokens) | {"step": step, "rollout_id": of_each_token})
    writer.flush()


def whole(run: RecordedRun, step: int, *, ranks: int = 2) -> None:
    for rank in range(ranks):
        share(run, step, rank, ranks=ranks)


def counted(home: Path) -> list[tuple[int, int, int]]:
    """Responses and tokens of each step that count, each of them once."""
    with Store.open(home) as store:
        keys = "count(distinct (step, rollout_id, position))"
        assert store.query(f"select count(*) = {keys} from tokens").rows == [(True,)], "doubled"
        both = "from rollouts join tokens using (step, rollout_id) group by step order by step"
        return store.query(f"select step, count(distinct rollout_id), count(*) {both}").rows


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path, "sums-1", status="running")
    run.start(1)
    whole(run, 1)
    return run


def test_a_step_counts_once_every_rank_has_written_it(tmp_path: Path, run: RecordedRun) -> None:
    share(run, 2, 1)
    assert counted(tmp_path) == [(1, 4, 12)]
    ingest(tmp_path)
    assert counted(tmp_path) == [(1, 4, 12)]
    share(run, 2, 0)
    assert counted(tmp_path) == [(1, 4, 12), (2, 4, 12)]
    ingest(tmp_path)
    assert counted(tmp_path) == [(1, 4, 12), (2, 4, 12)]
    assert check(tmp_path, full=True) == []


def test_a_rank_without_responses_leaves_an_empty_share(tmp_path: Path, run: RecordedRun) -> None:
    share(run, 2, 0)
    share(run, 2, 1, count=0)
    assert counted(tmp_path) == [(1, 4, 12), (2, 2, 6)]
    ingest(tmp_path, compact="sums-1", whole=True, keep_seconds=0.0)
    assert counted(tmp_path) == [(1, 4, 12), (2, 2, 6)]


def test_what_a_kill_left_of_a_step_never_counts_and_a_later_attempt_may_have_other_ranks(
    tmp_path: Path, run: RecordedRun
) -> None:
    whole(run, 2)
    share(run, 3, 0)
    run.start(2, resumed_from_step=1)
    whole(run, 2, ranks=3)
    assert counted(tmp_path) == [(1, 4, 12), (2, 6, 18)]
    run.start(3, resumed_from_step=2)
    run.step(3, rollouts=4)
    run.flush()
    expected = [(1, 4, 12), (2, 6, 18), (3, 4, 12)]
    assert counted(tmp_path) == expected
    for _ in range(2):
        compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0)
        assert counted(tmp_path) == expected
    names = sorted(path.name[:35] for path in (run.path / "segments/tokens").iterdir())
    assert [name[:1] for name in names] == ["a", "c"]
    assert names[0].startswith("a0001-s000003-000003-r0000of0002-"), "the half of a step was not merged"


def test_a_share_that_is_too_large_to_be_merged_counts_beside_the_merged_one(
    tmp_path: Path, run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(run, 2, 0)
    share(run, 2, 1, tokens=2000)
    (large,) = (run.path / "segments/tokens").glob("a0001-s000002-*-r0001of0002-*")
    monkeypatch.setattr("storage.merging.compaction.LARGEST_BYTES", large.stat().st_size)
    for _ in range(2):
        compact_run(tmp_path, "sums-1", whole=True, keep_seconds=0.0)
        assert counted(tmp_path) == [(1, 4, 12), (2, 4, 4006)]
    left = [path for path in (run.path / "segments/tokens").iterdir() if path.name.startswith("a")]
    assert left == [large]
