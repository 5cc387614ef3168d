"""What processes tell each other: every value comes back, nothing but values comes back."""

import math
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpg.evaluation.records import Answered
from rpg.messages import decoded, encoded, message
from rpg.rewards.score import Score
from rpg.types import Problem, RecordedTurn, Rollout, RolloutGroup, Turn
from specs.errors import Issue


@dataclass(frozen=True)
class Unmarked:
    """No message."""

    value: int


ANSWERED = Answered(Problem("p", "q", "a", "set", {"deep": [1]}), 0, "text", 3, "length", Score(1.0, True))
TURNS = (RecordedTurn(sampled=True, num_tokens=2, text="a", reward=1.0), RecordedTurn(False, 1, "b", tool="c"))


def rollouts(count: int) -> list[RolloutGroup]:
    turn = Turn(tuple(range(50)), tuple(-0.1 * number for number in range(50)))
    return [RolloutGroup((1, 2, 3), (Rollout((turn, Turn((4,))), "stop"),) * count, 7)] * count


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1.5, 2**80, "text \u2028 \x00", b"\x00bytes", Path("/a/b"), [], (), {}),
        *([1, [2, (3, None)]], {1: "a", "b": {"c": (1.0,)}, (1, 2): []}),
        *(list(range(100)), tuple(0.1 * number for number in range(100)), [2**70] * 40, [True] * 40, [1.0, 1] * 40),
        [Issue("wrong", ("a", 0), given="x")],
        rollouts(2),
        rollouts(40),
        [Score(0.5, True, extracted="3", terms={"length": 1.0})] * 40 + [Score.failed("no")],
        [[ANSWERED] * 50],
        [replace(ANSWERED, turns=TURNS)] * 50,
    ],
)
def test_a_value_comes_back_as_it_was_sent(value: Any) -> None:
    again = decoded(encoded(value))
    assert again == value
    assert repr(again) == repr(value)  # True is not 1, nor 1.0


def test_floats_come_back_with_every_bit() -> None:
    values = [math.inf, -math.inf, 5e-324, 0.1 + 0.2, -0.0]
    for sent in (values, values * 20):
        assert [value.hex() for value in decoded(encoded(sent))] == [value.hex() for value in sent]
    assert math.isnan(decoded(encoded(math.nan)))


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(6).reshape(2, 3).T, torch.tensor(1.5), torch.zeros(0, 3), torch.tensor([True, False])),
        torch.randn(4, 5).to(torch.bfloat16),
    ],
)
def test_a_tensor_comes_back_with_type_and_shape(tensor: torch.Tensor) -> None:
    again = decoded(encoded([tensor]))[0]
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor)
    again.fill_(1)  # it is the receiver's own


@pytest.mark.parametrize("values", [np.arange(6, dtype=np.int32)[::2], np.zeros((0, 2)), np.array([True]), np.array(3)])
def test_an_array_comes_back_with_type_and_shape(values: Any) -> None:
    again = decoded(encoded(values))
    assert (again.dtype, again.shape) == (values.dtype, values.shape)
    assert np.array_equal(again, values)
    assert decoded(encoded(np.int64(3))) == 3


@pytest.mark.parametrize("value", [Unmarked(1), {1, 2}, print, np.array([print]), [object()]])
def test_what_is_no_plain_value_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent between processes"):
        encoded(value)


def test_bytes_that_name_code_make_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (ran,)

    def document(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    bomb = pickle.dumps(Bomb())
    given = f'"{ran}"'.encode()
    for content in [
        bomb,
        document(bomb),
        document(b'[{"message": ["pathlib.Path.touch", ' + given + b"]}, []]"),
        document(b'[{"message": ["tests.rpg.test_rank_messages.Unmarked", 1]}, []]'),
        document(b'[{"tensor": ["load", [1], 0]}, [1]]') + b"1",
        document(b'[{"array": ["O", [1], 0]}, [8]]') + b"12345678",
        document(b'[{"numbers": ["q", 0]}, [1000000000000]]'),
        document(b"[" * 100_000),
        *(b"", b"\xff" * 40, document(b'[{"bytes": 3}, []]')[:-1], document(b"[1, [], 2]")),
    ]:
        with pytest.raises(ValueError):  # noqa: PT011  # whatever it says
            decoded(content)
    assert not ran.exists()
    pickle.loads(bomb)
    assert ran.exists()  # it would have


def test_a_message_is_made_by_its_constructor_which_may_refuse_it() -> None:
    turn = encoded(Turn((1,), (0.5,))).replace(b"[0.5]", b"[0.5, 0.5]")
    length = int.from_bytes(turn[:8], "little") + 5
    with pytest.raises(ValueError, match="1 sampled tokens have 2 logprobs"):
        decoded(length.to_bytes(8, "little") + turn[8:])


def test_a_marked_class_is_sent_and_one_in_its_place_is_not() -> None:
    kind = message(Unmarked.__class__("Marked", (Unmarked,), {"__module__": "elsewhere"}))
    again = decoded(encoded(kind(3)))
    assert type(again) is kind
    impostor = type("Marked", (Unmarked,), {"__module__": "elsewhere"})
    with pytest.raises(TypeError):
        encoded(impostor(3))
