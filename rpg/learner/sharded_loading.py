"""Loads, at ZeRO 3, a model that is too large for one device: rank 0 reads it, and each parameter is cut into
shards."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rpg.pretrained import model_of
from rpg.processes import ranks


@torch.no_grad()
def read_on_first_rank(weights_dir: Path, **settings: Any) -> PreTrainedModel:
    """Returns the model in host memory. Rank 0 has the parameters' values; the other ranks only reserve memory for
    them.

    All ranks call it. Memory that is reserved but not written takes no space.

    Args:
        weights_dir: a transformers model directory.
        settings: passed to `from_pretrained`.
    """
    first = ranks.rank() == 0
    model: PreTrainedModel = model_of(weights_dir, device_map=None if first else "meta", **settings)
    if not first:
        model.to_empty(device="cpu")
    # Whether two weights are tied may depend on their values, which only rank 0 has read.
    model.all_tied_weights_keys = ranks.from_first(model.all_tied_weights_keys)
    model.tie_weights(recompute_mapping=False)
    for buffer, value in zip(model.buffers(), ranks.from_first(list(model.buffers())), strict=True):
        buffer.copy_(value)
    return model


def shard(policy: nn.Module, settings: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
    """Cuts every parameter into one shard per rank, with the values of rank 0. All ranks call it.

    DeepSpeed would first move the whole model to every device. Here only one parameter at a time is whole on a device.

    Args:
        policy: the model in host memory, as `read_on_first_rank` returns it.
        settings: DeepSpeed's settings.
        dtype: type to which all parameters are converted, as DeepSpeed does with a model that is not sharded yet.
        device: device on which the policy computes.
    """
    from rpg.learner.deepspeed_imported import deepspeed

    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=policy, config_dict_or_path=settings)
    policy.to(device)  # buffers are whole everywhere
