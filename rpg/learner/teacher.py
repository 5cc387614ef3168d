"""A frozen model beside the policy: loaded once, whole on every rank, or at ZeRO 3 cut into one shard a rank."""

from pathlib import Path
from typing import Any

import torch

from rpg.learner.deepspeed import inference_config
from rpg.learner.passes import Passes
from rpg.learner.policy import Policy, load_model
from rpg.learner.sharded_loading import shard
from specs.schema.training import Training


def open_teacher(weights_dir: Path, training: Training, *, temperature: float, device: torch.device) -> Passes:
    """The teacher's passes, in the training precision. Nothing of it is trained, saved or moved. All ranks call it.

    Args:
        weights_dir: a transformers model directory.
        temperature: logits are divided by it, as the policy's are.
    Raises:
        SpecError: ranks cannot share this model's sequences, or it scales its logits.
    """
    frozen = training.model_copy(update={"lora": None, "gradient_checkpointing": False, "kernels": "torch"})
    model = load_model(weights_dir, frozen).requires_grad_(False)
    policy: Any = Policy(model, temperature=temperature)
    if training.zero_stage < 3:
        return Passes(policy.to(device), model.config, training, device)
    from rpg.learner.deepspeed_imported import deepspeed

    settings = inference_config(training)
    shard(policy, settings, dtype=getattr(torch, training.precision), device=device)
    engine, *_ = deepspeed.initialize(model=policy, config=settings)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    deepspeed.zero.register_external_parameter(policy, head.weight)
    return Passes(engine, model.config, training, device)
