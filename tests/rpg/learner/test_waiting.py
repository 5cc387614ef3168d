"""A pass waits for nothing: it reads no value of a tensor and copies none to the host.

On the device `meta` tensors have no values, so that whatever would wait for a GPU is an error there.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rpg.batches.batch import Microbatch
from rpg.batches.ledger import TokenLedger
from rpg.batches.minibatches import cut, plan_step
from rpg.learner.deepspeed import deepspeed_config
from rpg.learner.packing import ATTENTION, Packing
from rpg.learner.policy import Policy
from rpg.learner.sequence_parallel import SequenceGroup
from rpg.metrics import UpdateMetrics
from rpg.trainer import Trainer
from specs.schema.experiment import Experiment
from tests.rpg.learner_worker import responses
from tests.rpg.tiny_engine import qwen3
from tests.rpg.tiny_run import SPEC

OBJECTIVES: list[dict[str, Any]] = [
    {"objective": {"type": "rpg", "kl_coef": 0.1}},
    {"objective": {"type": "rpg", "level": "sequence", "clip": {"type": "truncate"}}},
    {"objective": {"type": "gspo"}, "reference": {"source": "initial", "update": None}},
    {"objective": {"type": "grpo"}, "reference": {"source": "initial", "update": None}, "rollout": {"engine": "vllm"}},
]
CORRECTED = {"correction": {"type": "truncate"}}


class PlainLearner:
    """The policy without DeepSpeed."""

    routing = None

    def __init__(self, device: torch.device) -> None:
        model = qwen3()
        model.config._attn_implementation = ATTENTION
        self.policy = Policy(model, temperature=1.3).to(device)
        self.device = device

    def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        packing = Packing(batch.packed, self.device) if batch.packed else None
        logprobs, entropies = self.policy(batch.input_ids, batch.sources, batch.targets, packing=packing)
        return logprobs, entropies

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def make_passes(spec: Experiment, device: torch.device, *, packed: bool) -> None:
    """All passes of one update of the learner's tests' responses, as the trainer makes them."""
    step = responses()
    parts = SimpleNamespace(
        spec=spec, learner=PlainLearner(device), device=device, reference=None, run=SimpleNamespace(inputs=lambda: {})
    )
    trainer = Trainer(parts, None, None, None, None)  # type: ignore[arg-type]  # a pass takes no more of the parts
    [minibatch] = cut(step, plan_step(step, spec.training, packed=packed), device)
    ledger, metrics = TokenLedger(len(step.rollout_logprobs), device), UpdateMetrics(device)
    advantage = torch.zeros(len(step.rollout_logprobs), device=device)
    assert len(minibatch.passes) > 1
    for number, batch in enumerate(minibatch.passes):
        trainer.add_pass(minibatch, batch, advantage, ledger, metrics, gives_old=True)
        if device.type == "cuda" and number == 0:  # one-time allocations, such as a kernel's own memory, are done now
            torch.cuda.set_sync_debug_mode("error")


def spec_of(changes: dict[str, Any]) -> Experiment:
    training = {**SPEC["training"], "minibatches": 1}
    rollout = {**SPEC["rollout"], **CORRECTED, **changes.get("rollout", {})}
    return Experiment.model_validate({**SPEC, **changes, "training": training, "rollout": rollout})


@pytest.mark.more
@pytest.mark.parametrize(
    ("changes", "packed"),
    [*((changes, True) for changes in OBJECTIVES), (OBJECTIVES[0], False)],
    ids=lambda value: value["objective"]["type"] if isinstance(value, dict) else "packed" if value else "padded",
)
def test_a_pass_reads_no_value_and_copies_none_to_the_host(changes: dict[str, Any], packed: bool) -> None:
    make_passes(spec_of(changes), torch.device("meta"), packed=packed)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the first of two ranks, of which the other is not there: their messages are not sent."""
    import deepspeed.comm.comm
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    # As the learner has it: nothing is compiled, and no rank waits for another's compilation.
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    deepspeed.init_distributed("fake", verbose=False)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_pass_whose_row_ranks_share_reads_no_value_either(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharing(PlainLearner):
        def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
            packing = Packing(batch.packed, self.device)
            given = batch.input_ids, batch.sources, batch.targets
            group = SequenceGroup(2, self.policy.model.config)
            return group.logprobs(self.policy, *given, packing=packing, host_sources=batch.host_sources)

    monkeypatch.setitem(globals(), "PlainLearner", Sharing)
    make_passes(spec_of(OBJECTIVES[0]), torch.device("meta"), packed=True)


def test_deepspeed_does_not_time_passes_for_which_it_would_wait_for_the_gpu() -> None:
    from deepspeed.utils.config import get_timers_config

    settings = deepspeed_config(spec_of({}).training, lends_weights=False, on_gpu=True)
    assert not get_timers_config(settings).enabled


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_a_pass_on_a_gpu_does_not_wait_for_it(packed: bool) -> None:
    try:
        make_passes(spec_of(OBJECTIVES[0]), torch.device("cuda"), packed=packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
