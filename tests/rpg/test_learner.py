"""The gradient is one and the same however the work is cut: into microbatches, over ranks, into shards."""

import sys
from pathlib import Path

import numpy as np
import pytest

from specs.errors import SpecError
from tests.rpg.tiny_run import finish, free_port, make_inputs, start

STAGES = [f"{zero}:float32:60" for zero in range(4)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights after five updates, of every case."""
    inputs, out = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("results")
    make_inputs(inputs)
    alone = ["plain", *STAGES, "0:float32:1", "0:float32:100000", "0:bfloat16:60", "2:bfloat16:60"]
    alone += ["plain:lora", "0:float32:60:lora", "3:bfloat16:60:lora"]
    command = [sys.executable, "-m", "tests.rpg.learner_worker", str(inputs), str(out)]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start([*command, *alone])]
    processes += [
        start(
            [*command, *STAGES, "1:bfloat16:60", "3:float32:60:lora"],
            environment={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    finish(*processes)
    return out


def test_an_architecture_that_caps_its_logits_is_refused() -> None:
    from transformers import Gemma2Config

    from rpg.engines.policy import check_logits

    with pytest.raises(SpecError, match="scales or caps its logits"):
        check_logits(Gemma2Config())


def worst(results: Path, case: str, other: str) -> float:
    """The largest relative difference in norm of any tensor, the gradient norm included."""
    one, two = np.load(results / f"{case}.npz"), np.load(results / f"{other}.npz")
    assert set(one) == set(two)
    return max(float(np.linalg.norm(one[name] - two[name]) / np.linalg.norm(two[name])) for name in one)


def test_the_updates_move_every_tensor(results: Path) -> None:
    import safetensors.numpy

    base = safetensors.numpy.load_file(next(results.parent.glob("inputs*/base/model.safetensors")))
    trained = np.load(results / "plainx1.npz")
    assert all(np.linalg.norm(trained[name] - base[name]) > 1e-4 for name in base)


@pytest.mark.parametrize("case", STAGES)
def test_five_updates_are_those_of_plain_pytorch(results: Path, case: str) -> None:
    assert worst(results, f"{case}x1", "plainx1") < 1e-5


@pytest.mark.parametrize("case", STAGES)
def test_two_ranks_give_the_parameters_of_one(results: Path, case: str) -> None:
    assert worst(results, f"{case}x2", f"{case}x1") < 1e-5


@pytest.mark.parametrize("tokens", [1, 100000])
def test_microbatch_size_does_not_change_the_gradient(results: Path, tokens: int) -> None:
    assert worst(results, f"0:float32:{tokens}x1", "0:float32:60x1") < 1e-5


@pytest.mark.parametrize("case", ["0:bfloat16:60x1", "2:bfloat16:60x1", "1:bfloat16:60x2"])
def test_bfloat16_stays_near_float32(results: Path, case: str) -> None:
    assert 0 < worst(results, case, "plainx1") < 0.06


@pytest.mark.parametrize("case", ["0:float32:60:lorax1", "3:float32:60:lorax2"])
def test_adapters_are_those_of_plain_pytorch(results: Path, case: str) -> None:
    assert worst(results, case, "plain:lorax1") < 1e-4


def test_only_adapted_weights_move(results: Path) -> None:
    import safetensors.numpy

    base = safetensors.numpy.load_file(next(results.parent.glob("inputs*/base/model.safetensors")))
    trained = np.load(results / "0:float32:60:lorax1.npz")
    for name, weight in base.items():
        adapted = any(target in name for target in ("q_proj", "v_proj", "down_proj"))
        assert np.array_equal(trained[name], weight) != adapted, name


def test_bfloat16_adapters_stay_near_float32(results: Path) -> None:
    assert 0 < worst(results, "3:bfloat16:60:lorax1", "plain:lorax1") < 0.06
