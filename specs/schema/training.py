"""The training stage: batch algebra, optimizer, how the work is spread, and guards on its metrics."""

from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from specs.bounds import MAX_RANKS
from specs.metrics import METRICS, REWARD
from specs.schema.base import Spec, addition, execution, no_flag
from specs.schema.schedule import ClosedLoop, Schedulable, ValueSchedule

if TYPE_CHECKING:
    GuardableMetric: TypeAlias = str
    GuardedMetric: TypeAlias = str
else:
    GuardableMetric = Literal[tuple(metric.name for metric in METRICS if metric.guardable)]
    GuardedMetric = Literal["not_finite", GuardableMetric]

Rate = Annotated[float | ValueSchedule, Schedulable(gt=0)]


class Guard(Spec):
    """Watches one metric after every step, before the step's checkpoint is saved."""

    metric: GuardedMetric
    """The metric (docs/metrics.md); not_finite: the loss or the gradient norm is NaN or infinite, which needs no bound.
    A run without a guard on not_finite has one with action stop; training.on_not_finite says when it acts on an
    update. A step in which every update was skipped has no metrics of updates, and no guard on these looks at it."""
    above: float | None = None
    """A value above it violates the guard; so does NaN."""
    below: float | None = None
    """A value below it violates the guard; so does NaN."""
    for_steps: int = Field(1, ge=1)
    """The guard acts when so many steps in a row violate it."""
    action: Literal["warn", "stop", "roll_back"] = "stop"
    """warn: an event and a line in the log, once until a step is within the bounds again. stop: the run fails after the
    step, without a checkpoint of it. roll_back: training goes on from the last checkpoint before the violation, with a
    lower learning rate; if the guard then fires again by the same step, from an earlier checkpoint."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """roll_back: the learning rate of later steps is multiplied by it, each time."""
    at_most: int = Field(2, ge=1)
    """roll_back: how often this guard does so in a run; after that it stops the run."""

    @model_validator(mode="after")
    def _bounded(self) -> "Guard":
        if self.metric == "not_finite":
            if self.above is not None or self.below is not None:
                raise ValueError("not_finite has no bounds: leave above and below out")
            if self.action == "warn":
                raise ValueError("after a gradient that is no number the weights are none either: stop or roll_back")
        elif self.above is None and self.below is None:
            raise ValueError("a guard needs a bound: above, below or both")
        return self


class Optimizer(Spec):
    """AdamW, or Schedule-Free AdamW (Defazio 2024, arXiv:2405.15682): the policy is then an average over the updates,
    and gradients are taken between it and the newest iterate. A learning rate by steps holds for all updates of a
    step."""

    type: Literal["adamw", "schedule_free_adamw"] = "adamw"
    """schedule_free_adamw takes schedule.warmup_updates and no decay."""
    learning_rate: Rate = 1e-6
    """Peak learning rate; `schedule.type` and the warm-up scale it."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moment, each in [0, 1). Schedule-free has no first moment: its first beta, above 0,
    is the share of the average in the point where gradients are taken."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled: an update takes learning_rate x weight_decay of each weight away."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A gradient of a greater global norm is scaled down to it."""


class Lora(Spec):
    """Low-rank adapters, Hu 2021, arXiv:2106.09685: W + (alpha / rank) B A stands for each adapted weight W. Only A and
    B are trained; W has no gradient and no optimizer state. There is no dropout: the ratio compares two passes."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """The product B A is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear modules that get adapters, such as q_proj; empty: all but the output head."""


class Schedule(Spec):
    """The learning rate over optimizer updates."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decayed to 0 at the last update."""
    warmup_updates: int = Field(0, ge=0)
    """Updates over which the rate rises linearly; the first update's is above 0."""


class Offload(Spec):
    """State that is kept in host memory."""

    optimizer: bool = False
    """The optimizer's state, and its step on the CPU; needs ZeRO 2 or 3."""
    parameters: bool = False
    """The parameters while they are not in use; needs ZeRO 3."""
    while_sampling: bool | Literal["auto"] = "auto"
    """What only an update needs, from the end of one step's updates to the beginning of the next step's: optimizer
    state, float32 master weights, room for gradients. They go and come at the speed of the link to the host, and while
    rollouts are sampled the sampler can have their memory: a vLLM engine that sleeps a higher rollout.memory_fraction,
    transformers a higher rollout.max_concurrent. auto: on a GPU, where the sampler lacks that memory, as `rpg plan` has
    it; see rollout.sleep. Else false."""

    @property
    def leaves_while_sampling(self) -> bool:
        """Whether it goes. Where the plan has not chosen, auto is false."""
        return self.while_sampling is True


class KeepBest(Spec):
    """Which checkpoint is the best: by a metric's mean over the steps since the checkpoint before it, or by accuracy on
    an evaluation set. Of equally good ones the later."""

    metric: GuardableMetric = execution(REWARD.name)
    """Name of the metric, as recorded at every step (docs/metrics.md)."""
    mode: Literal["max", "min"] = execution("max")
    """Whether the largest mean is the best, or the smallest."""
    accuracy_on: str = execution("")
    """Name of an evaluation set: the best is the checkpoint with the highest accuracy there, of those measured by
    evaluation.every_steps, and its weights are exported too. It is chosen on the very problems that it is measured on,
    so its accuracy is optimistic. Empty: by the metric."""

    @model_validator(mode="after")
    def _chooses_by_one(self) -> Self:
        if self.accuracy_on and (self.metric, self.mode) != (REWARD.name, "max"):
            raise ValueError("chooses by accuracy_on or by metric, not by both")
        return self


class Checkpoint(Spec):
    """When the whole state is saved. The last step always is."""

    every_steps: int = execution(10, ge=1)
    """Steps between two checkpoints."""
    keep_last: int = execution(2, ge=1)
    """Full checkpoints kept for resuming."""
    keep_every: int = execution(0, ge=0)
    """Steps: checkpoints of its multiples are kept for good. A multiple of every_steps; 0: none is kept for that."""
    keep_best: KeepBest | None = execution(None)
    """The best so far by a metric is kept as well."""
    keep_days: float = execution(0.0, ge=0)
    """Days from a run's finish until `rpg gc` frees its checkpoints; exported weights stay. 0: they are kept. Without
    them more steps begin anew, and no step can be trained again."""

    @model_validator(mode="after")
    def _keeps_what_is_saved(self) -> Self:
        if self.keep_every % self.every_steps:
            raise ValueError(f"keep_every must be a multiple of every_steps ({self.every_steps})")
        return self


class Training(Spec):
    """A step samples prompts_per_step x group_size responses and trains on them in minibatches x epochs updates."""

    steps: int = Field(ge=1)
    """Batches of rollouts."""
    prompts_per_step: int = Field(ge=1)
    """Prompts sampled in a step."""
    group_size: int = Field(ge=1)
    """Responses sampled for each prompt."""
    minibatches: int = Field(1, ge=1)
    """Parts a step's rollouts are split into, one optimizer update each; must divide prompts_per_step x group_size."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's rollouts."""
    lora: Lora | None = addition(None)
    """Train low-rank adapters instead of the model's own weights."""
    mask_truncated: bool = addition(False)
    """Overlong filtering: responses cut at rollout.max_response_length count for their group's advantages only; they
    are in no loss and no denominator."""
    skip_zero_advantage: bool = addition(False)
    """Compute no forward and backward of a response whose advantages are all exactly 0, as in a group of equal rewards,
    where the objective gives it no gradient: no divergence in the loss, no entropy bonus. The update stays the same,
    and so does every denominator. Metrics over tokens (entropy, kl, ratio, clip_fraction, weight) are then over the
    tokens computed, whose share is trained_fraction; an update that could skip all of them computes its shortest
    response. The logprobs of skipped tokens are not recorded."""
    entropy_coef: Annotated[float | ValueSchedule | ClosedLoop, Schedulable(ge=0, of=("entropy",))] = addition(0.0)
    """Weight of the entropy bonus: the mean entropy of the policy at the sampled tokens, in nats, joins the objective,
    averaged as the losses are."""
    router_aux_loss_coef: float | None = addition(None, ge=0)
    """Weight of the loss that balances the load of a mixture's experts, the metric `aux_loss`, in the loss. It is over
    the sampled tokens that are trained on; the tokens of each expert are counted before the step's updates. Left out:
    what the model's configuration says, its router_aux_loss_coef where output_router_logits is true, else 0."""
    optimizer: Optimizer = Optimizer()
    """How a gradient becomes an update."""
    schedule: Schedule = Schedule()
    """The learning rate over the updates."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; optimizer state and master weights stay float32. Left out: bfloat16 where the
    spec says `resources: {device: cuda}`, else float32, also where `device: auto` finds a GPU."""
    on_not_finite: Literal["stop", "skip"] = addition("stop")
    """An update whose gradient norm is NaN or infinite. stop: the guard on not_finite acts, which ends the run. skip:
    the update is not made, and weights and optimizer state stay as they are, to the last bit; the learning rate's
    schedule counts it. After 20 such updates in a row, or where no update of the run could be made, the guard acts."""
    guards: tuple[Guard, ...] = addition(())
    """Metrics to watch, and what happens when one is outside its bounds."""
    export_every_steps: int = Field(0, ge=0)
    """Steps between exports of weights that evaluation can read; 0 exports the last step only."""
    microbatch_tokens: int = execution(16384, ge=1)
    """Most tokens, padding included, of one forward pass on a rank, or on the ranks that share it. A response that has
    more by itself is a pass of its own, all parts of one that an agent splits together. No effect on the gradient."""
    gradient_reduction: Literal["auto", "float32"] = addition("auto")
    """Type in which ranks add up their gradients. auto: that of the passes, see `precision`. float32: float32, also
    where passes are in bfloat16: twice the bytes between ranks and of a bucket, and no rounding of the sum. What it
    costs on several GPUs is not measured."""
    packing: bool = execution(True)
    """Lay the responses of a pass end to end instead of padding them, and compute a prompt once for those of its group
    that are in the pass, where the model's attention keeps them apart. No effect on the gradient."""
    ranks: int = execution(1, ge=1, le=MAX_RANKS)
    """Data-parallel processes. The batch stays the same and is spread over them."""
    sequence_parallel_size: int = execution(1, ge=1)
    """Neighbouring ranks that share each sequence (DeepSpeed-Ulysses), each of which keeps the activations of its piece
    alone: for responses too long for the memory of one. Must divide ranks and the model's attention heads. No effect on
    the gradient."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], no_flag] = execution(0)
    """DeepSpeed ZeRO: 1 shards the optimizer, 2 the gradients as well, 3 the parameters as well. With 3, rank 0 reads
    the model into host memory, and no GPU has to hold the whole of it. In bfloat16, 0 and 1 run as 2, which adds the
    gradients of an update up in float32, each rank its share: else every rank would hold all of them, in both types."""
    offload: Offload = execution(Offload())
    """State that is kept in host memory."""
    kernels: Literal["auto", "torch", "liger"] = execution("auto")
    """What computes norms, rotations and the gates of MLPs: PyTorch's operations, or Liger-Kernel's, which read and
    write memory less often (the extra `liger`; on GPUs, for models of type llama, qwen2 and qwen3). auto: Liger's where
    they are installed, know the model, and give a tiny one the gradient that PyTorch gives it, which is tried at the
    start; else PyTorch's, and always on a CPU."""
    attention: Literal["auto", "torch"] = execution("auto")
    """What computes the attention of packed rows in bfloat16 on a GPU. torch: PyTorch's own kernel. auto:
    FlashAttention 3 on Hopper GPUs, or 4 on these and Blackwell's, where the package is installed and gives a small row
    the attention and gradient of PyTorch's kernel, which is tried at the start; else PyTorch's. No effect elsewhere."""
    gradient_checkpointing: bool | Literal["selective"] = execution(False)
    """Recompute activations in the backward pass, for a third more arithmetic. selective: all but the results of matrix
    products and attention, for hardly any more. No effect on the gradient."""
    checkpoint: Checkpoint = execution(Checkpoint())
    """When the whole state is saved."""

    @property
    def deepspeed_stage(self) -> int:
        """The ZeRO stage that DeepSpeed is given, see `zero_stage`."""
        return max(self.zero_stage, 2) if self.precision == "bfloat16" else self.zero_stage
