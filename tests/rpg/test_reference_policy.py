"""The weights of a reference that moves."""

import pytest
import torch
from torch import nn

from rpg.learner.passes import Passes
from rpg.reference import Snapshot, reference_policy
from specs.schema.reference import Reference, Update


def no_teacher() -> Passes:
    raise AssertionError("nothing asks for a teacher")


def module(precision: torch.dtype) -> nn.Module:
    policy = nn.Linear(8, 8, bias=False).to(precision)
    nn.init.constant_(policy.weight, 1.0)
    return policy


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_an_average_follows_the_policy_in_steps_finer_than_the_training_precision(precision: torch.dtype) -> None:
    policy = module(precision)
    reference = reference_policy(Reference(source="snapshot", update=Update(ema_decay=0.999)), policy, no_teacher)
    assert isinstance(reference, Snapshot)
    nn.init.constant_(policy.weight, 1.5)
    for _ in range(1000):
        reference.move(ema_decay=0.999)
    before = policy.weight.data
    with reference.in_place():
        assert policy.weight.dtype == precision
        assert policy.weight.flatten()[0].item() == pytest.approx(1.5 - 0.5 * 0.999**1000, abs=2**-8)
    assert policy.weight.data.data_ptr() == before.data_ptr()


def test_one_that_is_replaced_is_kept_in_the_training_precision() -> None:
    policy = module(torch.bfloat16)
    reference = reference_policy(Reference(source="snapshot", update=Update(every_steps=4)), policy, no_teacher)
    assert isinstance(reference, Snapshot)
    nn.init.constant_(policy.weight, 1.5)
    with reference.in_place():
        assert policy.weight.dtype == torch.bfloat16
        assert policy.weight.flatten()[0].item() == 1.0
    reference.move()
    with reference.in_place():
        assert policy.weight.flatten()[0].item() == 1.5
