"""One rank of the tests of shared sequences: `sequence_parallel_worker BASE SIZE PRECISION` prints what it measured.

A row of 501 tokens, two prompts with their responses, is computed by this rank alone and then with its group.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import Tensor
from transformers import AutoConfig

from rpg.learner.packing import Packing
from rpg.learner.policy import Policy, load_model
from rpg.learner.sequence_parallel import SequenceGroup
from rpg.processes import ranks
from specs.schema.training import Training
from tests.memory import PeakMemory

FAMILIES = ((60, 100, 33, 61), (47, 200))


def main(base: Path, size: int, precision: str) -> None:
    ranks.join("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as the learner: it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    training = Training.model_validate({"steps": 1, "prompts_per_step": 1, "group_size": 1, "precision": precision})
    policy = Policy(load_model(base, training), temperature=1.0, entropy_gradient=True)
    group = SequenceGroup(size, AutoConfig.from_pretrained(base))
    ids = torch.arange(sum(map(sum, FAMILIES)))[None] * 7 % 200
    # Not in the order of the row, as where a response's first token is predicted by a prompt before another response.
    sources = torch.cat([torch.arange(300, 500), torch.arange(59, 253)])
    weights = torch.linspace(-1, 1, len(sources))

    def gradients(logprobs: Tensor, entropies: Tensor) -> list[Tensor]:
        loss = (weights * logprobs).sum() + 0.1 * (entropies * logprobs.detach()).sum()
        loss.backward()
        taken = [parameter.grad.clone() for parameter in policy.parameters()]
        policy.zero_grad(set_to_none=True)
        return taken

    alone = policy(ids, sources, ids[0, sources + 1], packing=Packing(FAMILIES, ids.device))
    expected = gradients(*alone)
    # What others are given is not theirs to know: they have a row of another kind, as in the trainer.
    given = (ids, sources, ids[0, sources + 1]) if group.leads else (ids[:, :2], sources[:1], sources[:1])
    packing = Packing(FAMILIES if group.leads else ((1, 1),), ids.device)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [held for weight in policy.parameters() for held in (weight, weight.grad)]
    with PeakMemory(known) as memory:
        together = group.logprobs(policy, *given, packing=packing, host_sources=given[1])
        (weights * together[0]).sum().backward()
    policy.zero_grad(set_to_none=True)
    together = group.logprobs(policy, *given, packing=packing, host_sources=given[1])
    received = [ranks.total(gradient) * (size / ranks.world_size()) for gradient in gradients(*together)]
    print(
        json.dumps(
            {
                "peak": memory.peak,
                "logprobs": float((together[0] - alone[0]).abs().max()),
                "entropies": float((together[1] - alone[1]).abs().max()),
                "gradients": max(
                    float((one - two).norm() / two.norm()) for one, two in zip(received, expected, strict=True)
                ),
                "layers": packing.layers,
            }
        ),
        flush=True,
    )
    ranks.wait_for_all()
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
