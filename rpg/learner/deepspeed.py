"""The learner: a transformers model with DeepSpeed's gradients, optimizer and shards; and a frozen teacher."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rpg.batches.batch import Microbatch
from rpg.checkpoints.pieces import StateCopy
from rpg.learner import shards
from rpg.learner.adapters import save_adapter, whole_weights
from rpg.learner.deepspeed_inside import ask_torch_for_memory, show_shards
from rpg.learner.kernels import kernels_for
from rpg.learner.offloading import UpdateState
from rpg.learner.passes import Passes, frozen_passes
from rpg.learner.policy import Policy, attention_share, frozen_model, load_model
from rpg.learner.schedule_free import ScheduleFreeAdamW
from rpg.learner.sharded_loading import shard
from rpg.pretrained import config_of
from rpg.processes import ranks
from rpg.routing import ReplayedRouters, Routing, balancing_weight, check_balancing, check_replay
from specs.schema.schedule import largest
from specs.schema.training import Training


class Learner:
    """A policy in training under DeepSpeed. All ranks make the same calls in the same order."""

    def __init__(
        self, weights_dir: Path, training: Training, *, temperature: float, device: torch.device, lends_weights: bool
    ) -> None:
        """Loads the policy and shards it.

        Args:
            weights_dir: a transformers model directory.
            temperature: divisor of the logits in all logprobs.
            lends_weights: whether another policy's weights will be inserted for a pass (ReferencePolicy). At ZeRO 3 no
                parameter may then stay gathered between passes.
        Raises:
            SpecError: the spec's kernels cannot be used, or ranks cannot share this model's sequences.
        """
        from rpg.learner.deepspeed_imported import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # its compilation takes 31 s and saves nothing here
        )
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        ask_torch_for_memory()
        training = training.model_copy(update={"kernels": kernels_for(training, config_of(weights_dir), device)})
        model = load_model(weights_dir, training)
        self.balancing = balancing_weight(training, model.config)
        """Weight of the loss that balances the load of experts. 0 leaves the loss out."""
        check_balancing(training, model)
        self.policy = Policy(
            model,
            temperature=temperature,
            entropy_gradient=largest(training.entropy_coef) > 0,
            balances=self.balancing > 0,
        )
        self.attention_share = attention_share(model)
        """Factor of attention's work: a sequence of n tokens costs n + attention_share n^2, in units of one token
        without attention."""
        self.device = device
        self._training = training
        self._norm = float("nan")
        settings = deepspeed_config(training, lends_weights=lends_weights, on_gpu=device.type == "cuda")
        if training.zero_stage == 3:
            shard(self.policy, settings, dtype=getattr(torch, training.precision), device=device)
        self._engine, *_ = deepspeed.initialize(
            model=self.policy,
            model_parameters=[parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            optimizer=optimizer_maker(training),
            config=settings,
        )
        if clips_itself(training):
            self._engine.optimizer.register_step_pre_hook(self._clip)
        if training.zero_stage == 3:
            head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            deepspeed.zero.register_external_parameter(self.policy, head.weight)

        self.passes = Passes(self._engine, model.config, training, device)
        self._update_state: UpdateState | None = None
        """State that is moved to host memory between updates; None if it stays on the device."""
        if training.offload.leaves_while_sampling:
            self._update_state = UpdateState(self._engine, device)
            self._update_state.to_host()

    def replay_routing(self) -> None:
        """Makes passes route tokens to the experts that the microbatch specifies.

        Raises:
            SpecError: the model has no experts, or chooses them in a way that cannot be replayed.
        """
        check_replay(self.model.config)
        self.policy.routers = ReplayedRouters(self.model)

    @property
    def packs(self) -> bool:
        """See `Passes.packs`."""
        return self.passes.packs

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model in training. It is whole on every rank up to ZeRO 2, and sharded at ZeRO 3."""
        return self.policy.model

    @property
    def routing(self) -> Routing | None:
        """Returns the routing of the last pass's sampled tokens; None if the model's routers do not expose their
        choice, or if ranks share the pass's sequences."""
        return self.policy.routing if self._training.sequence_parallel_size == 1 else None

    def logprobs(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """See `Passes.logprobs`."""
        return self.passes.logprobs(batch)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context for `backward` and `update`.

        Outside the block the module holds the policy, which samples and computes all other logprobs. With
        offload.while_sampling, state that only updates need is then in host memory.

        With schedule_free_adamw the module holds, inside the block, the weights at which gradients are computed. With
        adamw these are the policy's own.
        """
        on_device = self._update_state.on_device() if self._update_state else nullcontext()
        with on_device, self._at_gradient_point():
            yield

    @contextmanager
    def _at_gradient_point(self) -> Iterator[None]:
        optimizer = self._engine.basic_optimizer
        if not isinstance(optimizer, ScheduleFreeAdamW):
            yield
            return
        optimizer.use_gradient_point()
        self._show_master_weights()
        try:
            yield
        finally:
            optimizer.use_average()
            self._show_master_weights()

    def _show_master_weights(self) -> None:
        """Copies the weights of ZeRO's optimizer into the module, as DeepSpeed does after an update."""
        zero = self._engine.optimizer
        if hasattr(zero, "update_lp_params"):
            zero.update_lp_params()
        elif self._training.zero_stage == 3:
            show_shards(zero)

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int], prompt_length: int) -> list[float]:
        """Returns the logprobs of the tokens after the prompt at temperature 1, nats, which the sentinel compares.

        All ranks call it.
        """
        ids = torch.tensor(token_ids, device=self.device)
        sources = torch.arange(prompt_length - 1, len(token_ids) - 1, device=self.device)
        logprobs, _ = self._engine(ids[None], sources, ids[prompt_length:], 1.0)
        return [float(logprob) for logprob in logprobs]

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradient. The losses of all microbatches and ranks of an update sum to the update's loss.

        DeepSpeed would divide by the accumulation steps (switched off here) and, to average, by the number of ranks
        (undone here).
        """
        self._engine.backward(loss * ranks.world_size(), scale_wrt_gas=False)

    def update(self, *, learning_rate: float) -> float:
        """Makes one optimizer update with the accumulated gradients. Returns their global norm before clipping.

        If the norm is not finite, nothing is updated: weights and optimizer state stay, and the gradients are dropped.
        """
        zero = self._engine.optimizer
        for group in zero.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        self.policy.choose_experts()
        norm = self._norm if clips_itself(self._training) else float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm) and self._training.deepspeed_stage == 2:
            # With the optimizer offloaded DeepSpeed keeps them and would add all later gradients to them.
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
        return norm

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._training.optimizer.max_grad_norm)
        self._norm = float(norm)
        if not math.isfinite(self._norm):  # as ZeRO does by itself; an optimizer skips parameters without a gradient
            for parameter in parameters:
                parameter.grad = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole weights one by one, under the transformers model's names. At ZeRO 3 each weight is gathered
        first.

        Adapters are merged into their weights.
        """
        for weight in whole_weights(self.model):
            with self._whole(weight.parts):
                yield weight.name, weight.whole()

    @contextmanager
    def _whole(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        if self._training.zero_stage < 3:
            yield
            return
        from rpg.learner.deepspeed_imported import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield

    def reset_optimizer(self) -> None:
        """Resets the optimizer's state to that before the first update. All ranks call it, between steps."""
        shards.reset(self._engine, self.model)

    def save(self, copy: StateCopy) -> None:
        """Adds this rank's share of the trained weights and of the optimizer's state to a copy.

        Frozen weights are left out: the base model has them.
        """
        shards.save(self._engine, self.model, copy)

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote, on any number of ranks and with any ZeRO stage."""
        shards.load(self._engine, self.model, directory)
        self._show_master_weights()
        if self._update_state:
            self._update_state.to_host()  # parameters for which the optimizer had no state before

    def export(self, directory: Path) -> None:
        """Writes the policy as a transformers model directory: safetensors and config. All ranks call it; rank 0
        writes.

        Adapters are merged; `adapter` also holds them separately, in PEFT's format.
        """
        first = ranks.rank() == 0
        state: dict[str, Tensor] = {}
        if first or self._training.zero_stage == 3:
            for name, weight in self.weights():  # all ranks gather it, rank 0 keeps it
                if first:
                    state[name] = weight.to("cpu", copy=True)
        if first:
            self.model.save_pretrained(directory, state_dict=state)
        if lora := self._training.lora:
            with self._whole([parameter for parameter in self.model.parameters() if parameter.requires_grad]):
                if first:
                    save_adapter(self.model, lora, directory / "adapter")


def clips_itself(training: Training) -> bool:
    """Returns whether the learner clips gradients instead of DeepSpeed, which loses their norm without ZeRO in
    float32."""
    return training.zero_stage == 0 and training.precision == "float32"


def optimizer_maker(training: Training) -> Callable[[list[nn.Parameter]], ScheduleFreeAdamW] | None:
    """Returns a function that makes the optimizer for a list of parameters; None if DeepSpeed builds it from its
    settings."""
    settings = training.optimizer
    match settings.type:
        case "adamw":
            return None
        case "schedule_free_adamw":
            return partial(
                ScheduleFreeAdamW,
                lr=largest(settings.learning_rate),
                betas=settings.betas,
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
            )
        case never:
            assert_never(never)


def deepspeed_config(training: Training, *, lends_weights: bool, on_gpu: bool) -> dict[str, Any]:
    """Returns DeepSpeed's settings. The learner itself decides when to update, and at which learning rate."""
    optimizer = training.optimizer
    zero: dict[str, Any] = {"stage": training.deepspeed_stage}
    if lends_weights:
        zero["stage3_param_persistence_threshold"] = 0
    if on_gpu and training.ranks > 1 and training.deepspeed_stage == 2 and not training.lora:
        # Gradients are summed over the ranks during the backward pass, from a second bucket, as at ZeRO 3 by default.
        # Adapters' gradients do not fill one bucket, so there is nothing to overlap.
        zero["overlap_comm"] = True
    if training.offload.optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if training.offload.parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if clips_itself(training) else optimizer.max_grad_norm,
        "bf16": {"enabled": training.precision == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        **({"communication_data_type": "fp32"} if training.gradient_reduction == "float32" else {}),
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # tests compare it with plain PyTorch
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": largest(optimizer.learning_rate),  # each update sets its own
                "betas": list(optimizer.betas),
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,
                "fused": True,  # on a CPU too: there it takes a tenth of the time, and nothing is compiled
            },
        },
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU before every pass
    }


def inference_config(training: Training) -> dict[str, Any]:
    """Returns DeepSpeed's settings for a frozen model at ZeRO 3."""
    settings = deepspeed_config(training, lends_weights=False, on_gpu=False)
    zero = {key: value for key, value in settings["zero_optimization"].items() if key != "offload_optimizer"}
    kept = {key: value for key, value in settings.items() if key != "optimizer"}
    return kept | {"zero_optimization": zero}


def open_teacher(weights_dir: Path, training: Training, *, temperature: float, device: torch.device) -> Passes:
    """Returns the passes of a teacher, in the training precision. All ranks call it.

    The teacher is a separate frozen model: loaded once, whole on every rank, or at ZeRO 3 cut into one shard per rank.
    It is never trained, saved or moved.

    Args:
        weights_dir: a transformers model directory.
        temperature: divisor of the logits, as for the policy.
    Raises:
        SpecError: ranks cannot share this model's sequences, or the model scales its logits.
    """
    if training.zero_stage < 3:
        return frozen_passes(weights_dir, training, temperature=temperature, device=device)
    model = frozen_model(weights_dir, training)
    policy: Any = Policy(model, temperature=temperature)
    from rpg.learner.deepspeed_imported import deepspeed

    settings = inference_config(training)
    shard(policy, settings, dtype=getattr(torch, training.precision), device=device)
    engine, *_ = deepspeed.initialize(model=policy, config=settings)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    deepspeed.zero.register_external_parameter(policy, head.weight)
    return Passes(engine, model.config, training, device)
