"""Each response on one rank: together the ranks hold, compute and write the same as a single rank."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg.checkpoints.pieces import StateCopy
from rpg.rollouts.ahead import WAITING, QueuedBatch, load_waiting, plain_waiting
from storage import Store
from tests.rpg.shares_worker import OBJECTIVES, RUN, advantages_here, record, the_step, trained_here
from tests.storage.recording import RecordedRun

pytestmark = pytest.mark.more

FIELDS = ("held", "token_ids", "sampled", "rollout_logprobs", "lengths", "num_sampled", "group_ids")


@dataclass(frozen=True)
class Shared:
    """What a number of ranks left, and what each of them held and computed."""

    out: Path
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    out = tmp_path_factory.mktemp("shared")
    (out / "checkpoint").mkdir()
    save_alone(out / "of_one_rank")
    RecordedRun(out, RUN).start(1)
    subprocess.run([sys.executable, "-m", "tests.rpg.shares_worker", str(out), str(request.param)], check=True)
    return Shared(out, [dict(np.load(out / f"rank{number}.npz")) for number in range(request.param)])


def save_alone(directory: Path) -> None:
    """A batch that waits, as one rank saves it."""
    directory.mkdir()
    copy = StateCopy()
    copy.values(WAITING, plain_waiting([QueuedBatch(2, the_step(), position=9)]))
    copy.write(directory)


def test_every_response_is_held_by_one_rank_before_and_after_it_is_handed_over(shared: Shared) -> None:
    for name in ("sampled", "trained"):
        held = np.concatenate([rank[name] for rank in shared.ranks])
        assert sorted(held) == list(range(25)), name
    moved = [set(rank["trained"]) - set(rank["sampled"]) for rank in shared.ranks]
    assert any(moved), "minibatches are dealt to all ranks"
    assert not any(response % 4 == 0 for each in moved for response in each), "without a signal it stays"
    tokens = [int(rank["tokens"][0]) for rank in shared.ranks]
    assert sum(tokens) == len(the_step().token_ids)
    assert max(tokens) < 0.75 * sum(tokens)


def test_advantages_are_those_of_one_rank(shared: Shared) -> None:
    step = the_step()
    starts = np.cumsum(step.num_sampled) - step.num_sampled
    for name, whole in advantages_here(step).items():
        for rank in shared.ranks:
            places = [starts[response] + np.arange(step.num_sampled[response]) for response in rank["trained"]]
            np.testing.assert_allclose(rank[name], whole[np.concatenate(places)], rtol=1e-6, atol=1e-7, err_msg=name)
    assert len(OBJECTIVES) == 3


def test_the_rows_of_all_ranks_are_those_of_one(shared: Shared, tmp_path: Path) -> None:
    RecordedRun(tmp_path, RUN).start(1)
    record(*trained_here(the_step()), tmp_path / "runs" / RUN)
    for table in ("rollouts", "tokens"):
        query = f"from {table} order by step, rollout_id"
        query += ", position" if table == "tokens" else ""
        with Store.open(tmp_path) as alone, Store.open(shared.out) as together:
            assert together.query(query).rows == alone.query(query).rows
        names = sorted(path.name for path in (shared.out / "runs" / RUN / "segments" / table).iterdir())
        assert len(names) == len(shared.ranks), "each rank writes its own"


def test_batches_that_wait_in_a_checkpoint_are_taken_over_by_any_number_of_ranks(shared: Shared) -> None:
    (loaded,) = load_waiting(shared.out / "checkpoint")
    (alone,) = load_waiting(shared.out / "of_one_rank")
    assert (loaded.step, loaded.position) == (2, 9)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(loaded.rollouts, name), getattr(alone.rollouts, name), err_msg=name)
    assert loaded.rollouts.responses == alone.rollouts.responses == the_step().responses
    first, *others = shared.ranks
    np.testing.assert_array_equal(first["loaded/token_ids"], the_step().token_ids)
    assert not any(len(rank["loaded/held"]) for rank in others), "the state of one rank goes to one"
