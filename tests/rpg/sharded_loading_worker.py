"""One rank of the test of loading for ZeRO 3: `sharded_loading_worker DIRECTORY...` loads each model and checks it."""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rpg.learner.deepspeed import deepspeed_config
from rpg.learner.policy import Policy, load_model
from rpg.learner.sharded_loading import shard
from rpg.processes import ranks
from specs.schema.training import Training
from tests.rpg.learner_worker import TRAINING, share_of_parameters


def check(directory: Path, precision: str) -> None:
    """Put together again, the model is what transformers reads; in shards, each rank holds half of it."""
    import deepspeed

    training = Training.model_validate(TRAINING | {"zero_stage": 3, "precision": precision})
    dtype = getattr(torch, precision)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    policy = Policy(load_model(directory, training), temperature=1.0)
    shard(
        policy, deepspeed_config(training, lends_weights=False, on_gpu=False), dtype=dtype, device=torch.device("cpu")
    )
    assert abs(share_of_parameters(policy) - 0.5) < 0.01
    for (name, parameter), (expected, weight) in zip(
        policy.model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == expected
        with deepspeed.zero.GatheredParameters([parameter]):
            assert parameter.dtype == dtype, name
            assert torch.equal(parameter, weight), name
    for (name, buffer), (expected, value) in zip(policy.model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == expected
        assert buffer.dtype == value.dtype, name
        assert torch.equal(buffer, value), name


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as the learner: it would be compiled first
    ranks.join("cpu")
    torch.set_num_threads(1)
    for directory in sys.argv[1:]:
        for precision in ("float32", "bfloat16"):
            check(Path(directory), precision)
    ranks.leave()
