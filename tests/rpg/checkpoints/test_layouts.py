"""A run continues with more or fewer ranks, and under another ZeRO stage, as if nothing had changed."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from rpg.checkpoints.pieces import Piece, PieceFiles, StateCopy
from tests.rpg.tiny_run import finish, group_of, make_inputs, start

LONG = ["float32:0-0-0", "float32:1-1-1", "float32:2-2-2", "float32+lora+schedule_free:0-3-2", "bfloat16:0-2-3"]
CASES = ["float32:3-3-3", *(pytest.param(case, marks=pytest.mark.long) for case in LONG)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Ways of a case: straight on one rank, and in legs on one rank, two ranks, one rank."""
    inputs, out = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("ways")
    make_inputs(inputs)

    @cache
    def gone(case: str) -> Path:
        for leg, world in ((1, 1), (2, 2), (3, 1)):
            command = [sys.executable, "-m", "tests.rpg.layout_worker", str(inputs), str(out), str(leg), case]
            finish(*(start(command, environment) for environment in group_of(world)))
        return out / case

    return gone


def whole(directory: Path, stem: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint that one rank wrote, by name."""
    files = PieceFiles(directory, stem)
    tensors = {}
    for name in files.names():
        count = sum(count for _, count, _ in files._index[name])
        tensors[name] = torch.empty(count)
        files.fill(Piece(name, 0, tensors[name]))
    return tensors


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_one_rank_to_two_and_back_is_one_rank_all_the_way(ends: Callable[[str], Path], case: str) -> None:
    tolerance, way = 1e-5 if case.startswith("float32") else 2e-2, ends(case)
    for stem in ("learner", "reference"):
        straight, legs = whole(way / "straight", stem), whole(way / "leg3", stem)
        assert straight.keys() == legs.keys()
        begun = whole(way / "leg1", stem)
        assert any(not torch.equal(straight[name], begun[name]) for name in straight), (
            "nothing moved since the first leg"
        )
        for name, expected in straight.items():
            assert torch.linalg.norm(legs[name] - expected) <= tolerance * torch.linalg.norm(expected), name
    counted = [PieceFiles(way / end, "learner").notes[0]["numbers"] for end in ("straight", "leg3")]
    assert counted[0] == counted[1]
    assert all(numbers["step"] == [5, "float32"] or numbers["step"] == [5, ""] for numbers in counted[0].values())
    assert json.loads((way / "leg3" / "trainer.json").read_text())["updates"] == 5


@pytest.mark.parametrize("case", CASES)
def test_a_run_set_back_to_a_checkpoint_comes_to_the_same_end_in_every_bit(
    ends: Callable[[str], Path], case: str
) -> None:
    way = ends(case)
    for stem in ("learner", "reference"):
        straight, again = whole(way / "straight", stem), whole(way / "again", stem)
        assert straight.keys() == again.keys()
        begun = whole(way / "leg1", stem)
        assert any(not torch.equal(straight[name], begun[name]) for name in straight), (
            "nothing moved since the first leg"
        )
        assert all(torch.equal(straight[name], again[name]) for name in straight)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_writes_its_own_part(ends: Callable[[str], Path], case: str) -> None:
    sizes = [path.stat().st_size for path in sorted((ends(case) / "leg2").glob("learner-rank*.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.5 * min(sizes)


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    pieces = [
        Piece("a", 0, torch.ones(2)),
        Piece("b", 0, torch.ones(1, dtype=torch.int64)),
        Piece("a", 2, torch.ones(1)),
    ]
    for name, order, notes in (("one", pieces, {"x": 1, "y": 2}), ("two", pieces[::-1], {"y": 2, "x": 1})):
        copy = StateCopy()
        copy.pieces("learner", order, notes)
        (tmp_path / name).mkdir()
        copy.write(tmp_path / name)
    one, two = ((tmp_path / name / "learner-rank00000.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_checkpoint_that_lacks_values_is_refused(tmp_path: Path) -> None:
    copy = StateCopy()
    copy.pieces("learner", [Piece("a", 0, torch.arange(3.0)), Piece("a", 5, torch.arange(2.0))])
    copy.write(tmp_path)
    files = PieceFiles(tmp_path, "learner")
    files.fill(Piece("a", 1, part := torch.zeros(2)))
    assert part.tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="holds 5 of the 7 values of a"):
        files.fill(Piece("a", 0, torch.zeros(7)))
    with pytest.raises(RuntimeError, match="holds 0 of the 1 values of b"):
        files.fill(Piece("b", 0, torch.zeros(1)))
    with pytest.raises(FileNotFoundError, match="holds no reference"):
        PieceFiles(tmp_path, "reference")
