"""The gradient is one and the same however the work is cut: into microbatches, over ranks, into shards."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.rpg.tiny_run import finish, group_of, make_inputs, start

pytestmark = pytest.mark.more

STAGES = [f"{zero}:float32:60" for zero in range(4)]
ALONE = [
    *["plain", *STAGES, "0:float32:1", "0:float32:100000", "0:float32:60:padded", "2:bfloat16:60"],
    *["0:float32:60:recomputed", "2:float32:60:offloaded", "3:float32:60:all_offloaded"],
    "0:float32:60:selective",
    *["plain:lora", "0:float32:60:lora", "3:bfloat16:60:all_offloaded:recomputed:lora"],
    *["plain:free", "0:float32:60:free", "3:bfloat16:60:free"],
    *["plain:poisoned", "0:float32:60:poisoned"],
    *["0:float32:60:away", "3:bfloat16:60:free:away"],
]
TOGETHER = [*STAGES, "3:float32:60:lora", "3:float32:60:free"]
TOGETHER += ["3:float32:60:away", "2:float32:60:poisoned", "0:float32:60:shared", "3:float32:60:selective"]
ONE_BY_ONE = ["1:bfloat16:1", "3:bfloat16:1"]
"""A response a pass, so that any number of ranks makes the same passes."""
ALONE += ONE_BY_ONE
TOGETHER += [f"{case}{option}" for case in ONE_BY_ONE for option in ("", ":exact_sum")]
BOUND = {"float32": 1e-5, "bfloat16": 0.03}
"""Bound of the relative error in norm of any tensor after five updates, and of the gradient norm.

In float32 it is what another order of summation does. In bfloat16 a number has a relative error of 2^-9, the weights
that come out too, and a gradient one of about 2^-7; AdamW divides it by its own size, so that an element whose gradient
is lost in rounding moves by the whole rate in either direction, which shows in tensors that have many of them.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights after five updates, of every case."""
    return updates(tmp_path_factory, ALONE, TOGETHER)


def updates(tmp_path_factory: pytest.TempPathFactory, alone: list[str], together: list[str]) -> Path:
    """Makes the updates of cases on one rank, and of others on two."""
    out = tmp_path_factory.mktemp("results")
    inputs = out / "inputs"
    make_inputs(inputs)
    command = [sys.executable, "-m", "tests.rpg.learner_worker", str(inputs), str(out)]
    processes = [start([*command, *alone])]
    processes += [start([*command, *together], environment) for environment in group_of(2)]
    finish(*processes, seconds=1800)
    return out


def worst(results: Path, case: str, other: str) -> float:
    """The largest relative difference in norm of any tensor, the gradient norm included."""
    one, two = np.load(results / f"{case}.npz"), np.load(results / f"{other}.npz")
    assert set(one) == set(two)
    return max(float(np.linalg.norm(one[name] - two[name]) / np.linalg.norm(two[name])) for name in one)


def test_the_updates_move_every_tensor(results: Path) -> None:
    import safetensors.numpy

    base = safetensors.numpy.load_file(results / "inputs/base/model.safetensors")
    trained = np.load(results / "plainx1.npz")
    assert all(np.linalg.norm(trained[name] - base[name]) > 1e-4 for name in base)


def plain(case: str) -> str:
    """The case to compare a case with."""
    options = [option for option in case.removesuffix("x1").removesuffix("x2").split(":")[3:] if option in PLAIN]
    return ":".join(["plain", *options]) + "x1"


PLAIN = ("lora", "free", "poisoned")


@pytest.mark.parametrize(
    "case", [f"{case}x1" for case in ALONE if not case.startswith("plain")] + [f"{case}x2" for case in TOGETHER]
)
def test_five_updates_are_those_of_plain_pytorch(results: Path, case: str) -> None:
    assert 0 < worst(results, case, plain(case)) < BOUND[case.split(":")[1]]


@pytest.mark.parametrize("case", [case for case in TOGETHER if case.startswith("3")])
def test_at_zero_3_no_rank_ever_holds_the_whole_model(results: Path, case: str) -> None:
    shares = [float((results / f"{case}-rank{rank}of2" / "share").read_text()) for rank in range(2)]
    assert shares == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("case", ["0:float32:60{}x1", "3:float32:60{}x2"])
def test_recomputing_some_activations_changes_no_bit_of_the_weights(results: Path, case: str) -> None:
    assert worst(results, case.format(":selective"), case.format("")) == 0


@pytest.mark.parametrize(
    "case",
    [f"{case}x1" for case in ALONE if "away" in case] + [f"{case}x2" for case in TOGETHER if "away" in case],
)
def test_state_that_leaves_the_device_between_updates_changes_no_bit_of_the_weights(results: Path, case: str) -> None:
    assert worst(results, case, case.replace(":away", "")) == 0


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_ranks_that_add_up_gradients_of_bfloat16_in_float32_do_what_one_rank_does(results: Path, case: str) -> None:
    """By default the sum of two ranks is rounded to bfloat16."""
    assert worst(results, f"{case}:exact_sumx2", f"{case}x1") < 1e-6
    assert worst(results, f"{case}x2", f"{case}x1") > 1e-4


def test_only_adapted_weights_move(results: Path) -> None:
    import safetensors.numpy

    base = safetensors.numpy.load_file(results / "inputs/base/model.safetensors")
    trained = np.load(results / "0:float32:60:lorax1.npz")
    for name, weight in base.items():
        adapted = any(target in name for target in ("q_proj", "v_proj", "down_proj"))
        assert np.array_equal(trained[name], weight) != adapted, name


def test_schedule_free_gives_other_weights_than_adamw(results: Path) -> None:
    assert worst(results, "plain:freex1", "plainx1") > 3 * BOUND["bfloat16"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_stage_precision_and_number_of_ranks_agrees_with_plain_pytorch(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cells = [
        f"{zero}:{precision}:60{option}"
        for zero in range(4)
        for precision in ("float32", "bfloat16")
        for option in ("", ":lora", ":free", ":lora:free", ":poisoned", ":away", ":lora:free:away", ":poisoned:away")
    ]
    offloaded = ["2:float32:60:offloaded:poisoned", "2:bfloat16:60:offloaded:poisoned"]
    shared = ["3:float32:60:recomputed:lora:shared", "2:bfloat16:60:shared", "2:bfloat16:60:selective:shared"]
    by_hand = ["plain", "plain:lora", "plain:free", "plain:lora:free", "plain:poisoned"]
    out = updates(tmp_path_factory, [*by_hand, *cells, *offloaded], [*cells, *shared])
    made = [f"{cell}x1" for cell in cells + offloaded] + [f"{cell}x2" for cell in cells + shared]
    errors = {case: worst(out, case, plain(case)) for case in made}
    print("\n".join(f"{case:40} {error:.1e}" for case, error in errors.items()))
    assert all(error < BOUND[case.split(":")[1]] for case, error in errors.items()), errors
    left = [case for case in made if ":away" in case]
    assert all(worst(out, case, case.replace(":away", "")) == 0 for case in left), left
    assert worst(out, "2:bfloat16:60:selective:sharedx2", "2:bfloat16:60:sharedx2") == 0
