"""How a model that has room on no rank comes to ZeRO 3: rank 0 reads it, and one parameter after another is cut up."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rpg.processes import ranks


@torch.no_grad()
def read_on_first_rank(weights_dir: Path, **settings: Any) -> PreTrainedModel:
    """The model on the host. Its parameters have values on rank 0 alone; the others only reserve memory for theirs.

    All ranks call it. What is reserved and not written to takes no room.

    Args:
        weights_dir: a transformers model directory.
        settings: of `from_pretrained`.
    """
    first = ranks.rank() == 0
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        weights_dir, device_map=None if first else "meta", **settings
    )
    if not first:
        model.to_empty(device="cpu")
    # Where the files have both of two weights that may be one, their values tell, and rank 0 has looked.
    model.all_tied_weights_keys = ranks.from_first(model.all_tied_weights_keys)
    model.tie_weights(recompute_mapping=False)
    for buffer, value in zip(model.buffers(), ranks.from_first(list(model.buffers())), strict=True):
        buffer.copy_(value)
    return model


def shard(policy: nn.Module, settings: dict[str, Any], *, dtype: torch.dtype, device: torch.device) -> None:
    """Leaves each rank its shard of every parameter, with the values of rank 0. All ranks call it.

    DeepSpeed would do it too, after it had moved the whole model to every device; here one parameter at a time is whole
    there.

    Args:
        policy: the model on the host, as `read_on_first_rank` has it.
        settings: DeepSpeed's.
        dtype: of all parameters; those of another are converted, as DeepSpeed converts a model that is no shard yet.
        device: where the policy computes.
    """
    import deepspeed

    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=policy, config_dict_or_path=settings)
    policy.to(device)  # the buffers, which are whole everywhere
