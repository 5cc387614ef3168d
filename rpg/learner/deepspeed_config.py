"""DeepSpeed's settings from a spec's training section."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rpg.learner.schedule_free import ScheduleFreeAdamW
from specs.schema.training import Training


def optimizer_maker(training: Training) -> Callable[[list[nn.Parameter]], ScheduleFreeAdamW] | None:
    """What makes the optimizer of a list of parameters; None where DeepSpeed makes the one of its settings."""
    settings = training.optimizer
    if settings.type == "adamw":
        return None
    return partial(
        ScheduleFreeAdamW,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


def deepspeed_config(training: Training, *, lends_weights: bool) -> dict[str, Any]:
    """DeepSpeed's settings. Accumulation boundary and learning rate are ours: it divides by and schedules nothing."""
    optimizer = training.optimizer
    clips_itself = training.zero_stage == 0 and training.precision == "float32"
    # Without ZeRO DeepSpeed would add bfloat16 gradients up in bfloat16; stage 1 keeps them in float32.
    zero: dict[str, Any] = {"stage": training.zero_stage or int(training.precision == "bfloat16")}
    if lends_weights:
        zero["stage3_param_persistence_threshold"] = 0
    if training.offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if training.offload.parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if clips_itself else optimizer.max_grad_norm,
        "bf16": {"enabled": training.precision == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # the tests here hold it against plain PyTorch
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": list(optimizer.betas),
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,
                "fused": True,  # on a CPU too: there it takes a tenth of the time, and nothing has to be compiled
            },
        },
        "steps_per_print": 10**9,
    }
