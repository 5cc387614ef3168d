"""One rank that trains a tiny model and reports its memory: `held_memory MODEL ZERO_STAGE PRECISION` prints JSON.

DeepSpeed is set up as on a GPU.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpg.learner import deepspeed
from rpg.processes import ranks
from specs.schema.training import Training
from tests.rpg.learner_worker import TRAINING

BUCKET = 10**8
"""Bytes that no tensor of the tiny model has."""


def held() -> list[int]:
    """Bytes of every storage that some tensor has, gradients included."""
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return list({store.data_ptr(): store.nbytes() for each in tensors if (store := each.untyped_storage())}.values())


def measure(directory: Path, training: Training) -> dict[str, Any]:
    """Bytes a weight of all that is held once gradients and optimizer state are there, and the bytes of the buckets."""
    config = deepspeed.deepspeed_config
    deepspeed.deepspeed_config = lambda training, **rest: config(training, **{**rest, "on_gpu": True})
    learner = deepspeed.Learner(directory, training, temperature=1.0, device=torch.device("cpu"), lends_weights=True)
    weights = list(learner.model.parameters())
    buckets = [0]
    # In the middle of a backward pass some buckets are there, and only then.
    weights[3].register_hook(lambda _: buckets.append(sum(size for size in held() if size > BUCKET)))
    ids = torch.arange(16).view(2, 8) % 5
    for update in range(2):
        with learner.updating():
            logprobs, _ = learner._engine(ids, torch.arange(7), ids.flatten()[1:8])
            learner.backward(logprobs.sum())
            if update:
                break
            learner.update(learning_rate=1e-3)
    number = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
    gc.collect()
    return {
        "bytes_a_weight": sum(size for size in held() if size < BUCKET) / number,
        "buckets": max(buckets),
    }


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    ranks.join("cpu")
    torch.set_num_threads(1)
    stage, precision = int(sys.argv[2]), sys.argv[3]
    settings = {"zero_stage": stage, "precision": precision, "ranks": ranks.world_size()}
    training = Training.model_validate(TRAINING | settings)
    found = measure(Path(sys.argv[1]), training)
    if ranks.rank() == 0:
        print(f"\n{json.dumps(found)}", flush=True)
    ranks.leave()
