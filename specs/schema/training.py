"""The training stage: batch sizes, optimizer, distribution over ranks, and guards on its metrics."""

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
    """A check of one metric after every step, before the step's checkpoint is saved."""

    metric: GuardedMetric
    """Metric to check (docs/metrics.md). not_finite: the loss or the gradient norm is NaN or infinite; it has no bound.
    A run without a guard on not_finite has one with action stop; training.on_not_finite determines when it acts on an
    update. A step in which every update was skipped has no metrics of updates, and guards on these ignore it."""
    above: float | None = None
    """Upper bound: a larger value violates the guard; so does NaN."""
    below: float | None = None
    """Lower bound: a smaller value violates the guard; so does NaN."""
    for_steps: int = Field(1, ge=1)
    """Number of consecutive violations after which the guard acts."""
    action: Literal["warn", "stop", "roll_back"] = "stop"
    """warn: records an event and a line in the log; warns again only after a step was within the bounds. stop: the run
    fails after the step, without a checkpoint of it. roll_back: training resumes from the last checkpoint before the
    violation, with a lower learning rate; if the guard then acts again by the same step, from an earlier checkpoint."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """roll_back: factor on the learning rate of later steps, applied at each rollback."""
    at_most: int = Field(2, ge=1)
    """roll_back: most rollbacks by this guard in a run; after that it stops the run."""

    @model_validator(mode="after")
    def _bounded(self) -> "Guard":
        if self.metric == "not_finite":
            if self.above is not None or self.below is not None:
                raise ValueError("not_finite has no bounds: leave above and below out")
            if self.action == "warn":
                raise ValueError("a NaN or infinite gradient ruins the weights: use stop or roll_back")
        elif self.above is None and self.below is None:
            raise ValueError("a guard needs a bound: above, below or both")
        return self


class Optimizer(Spec):
    """AdamW, or Schedule-Free AdamW (Defazio 2024, arXiv:2405.15682): the policy is then an average over the updates,
    and gradients are taken between it and the newest iterate. A scheduled learning rate applies to all updates of a
    step."""

    type: Literal["adamw", "schedule_free_adamw"] = "adamw"
    """Kind of optimizer. schedule_free_adamw allows schedule.warmup_updates but no decay."""
    learning_rate: Rate = 1e-6
    """Peak learning rate; `schedule.type` and the warm-up scale it."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moment, each in [0, 1). Schedule-free has no first moment: its first beta, above 0,
    is the weight of the average in the point at which gradients are taken."""
    epsilon: float = Field(1e-8, gt=0)
    """Number added to the square root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay: an update subtracts learning_rate x weight_decay of each weight."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest global norm of a gradient; a larger gradient is scaled down to it."""


class Lora(Spec):
    """Low-rank adapters, Hu 2021, arXiv:2106.09685: W + (alpha / rank) B A stands for each adapted weight W. Only A and
    B are trained; W has no gradient and no optimizer state. There is no dropout: the ratio compares two passes."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: the product B A is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear modules that get adapters, such as q_proj. Empty means all except the output head."""


class Schedule(Spec):
    """The learning rate over optimizer updates."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decayed to 0 at the last update."""
    warmup_updates: int = Field(0, ge=0)
    """Number of updates over which the learning rate rises linearly. That of the first update is above 0."""


class Offload(Spec):
    """State kept in host memory."""

    optimizer: bool = False
    """Keep the optimizer's state in host memory and compute its step on the CPU; needs ZeRO 2 or 3."""
    parameters: bool = False
    """Keep parameters in host memory while they are not in use; needs ZeRO 3."""
    while_sampling: bool | Literal["auto"] = "auto"
    """Move the state that only updates need (optimizer state, float32 master weights, gradient buffers) to host memory
    between one step's updates and the next's. The transfers take as long as the link to the host needs. While rollouts
    are sampled, the sampler can use that memory: a sleeping vLLM engine through a higher rollout.memory_fraction,
    transformers through a higher rollout.max_concurrent. auto: true on a GPU if, by the count of `rpg plan`, the
    sampler lacks that memory (see rollout.sleep); else false."""

    @property
    def leaves_while_sampling(self) -> bool:
        """Whether that state is moved. Until the plan has chosen, auto counts as false."""
        return self.while_sampling is True


class KeepBest(Spec):
    """Criterion for the best checkpoint: a metric's mean over the steps since the previous checkpoint, or the accuracy
    on an evaluation set. Of equally good checkpoints the later one wins."""

    metric: GuardableMetric = execution(REWARD.name)
    """Name of the metric, as recorded at every step (docs/metrics.md)."""
    mode: Literal["max", "min"] = execution("max")
    """Whether the largest or the smallest mean is best."""
    accuracy_on: str = execution("")
    """Name of an evaluation set. The best checkpoint then has the highest accuracy there, among those evaluated by
    evaluation.every_steps, and its weights are exported too. It is selected on the same problems, so that its accuracy
    is biased upward. Empty uses the metric."""

    @model_validator(mode="after")
    def _chooses_by_one(self) -> Self:
        if self.accuracy_on and (self.metric, self.mode) != (REWARD.name, "max"):
            raise ValueError("cannot use both accuracy_on and metric: set one of them")
        return self


class Checkpoint(Spec):
    """When the whole state is saved. The last step is always saved."""

    every_steps: int = execution(10, ge=1)
    """Steps between two checkpoints."""
    keep_last: int = execution(2, ge=1)
    """Number of full checkpoints kept for resuming."""
    keep_every: int = execution(0, ge=0)
    """Steps between checkpoints that are kept permanently; a multiple of every_steps. 0 keeps none permanently."""
    keep_best: KeepBest | None = execution(None)
    """Criterion by which the best checkpoint so far is kept as well."""
    keep_days: float = execution(0.0, ge=0)
    """Days from a run's end until `rpg gc` frees its checkpoints; exported weights are kept. 0 keeps the checkpoints.
    Without them, a run with more steps starts from the beginning, and no step can be retrained."""

    @model_validator(mode="after")
    def _keeps_what_is_saved(self) -> Self:
        if self.keep_every % self.every_steps:
            raise ValueError(f"keep_every must be a multiple of every_steps ({self.every_steps})")
        return self


class Training(Spec):
    """Training. A step samples prompts_per_step x group_size responses and trains on them in minibatches x epochs
    updates."""

    steps: int = Field(ge=1)
    """Number of steps; each trains on one batch of rollouts."""
    prompts_per_step: int = Field(ge=1)
    """Prompts sampled in a step."""
    group_size: int = Field(ge=1)
    """Responses sampled for each prompt."""
    minibatches: int = Field(1, ge=1)
    """Number of parts of a step's rollouts, each with one optimizer update. Must divide prompts_per_step x
    group_size."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's rollouts."""
    lora: Lora | None = addition(None)
    """Train low-rank adapters instead of the model's own weights."""
    mask_truncated: bool = addition(False)
    """Overlong filtering: responses cut at rollout.max_response_length count only for their group's advantages; losses
    and denominators exclude them."""
    skip_zero_advantage: bool = addition(False)
    """Skip the forward and backward pass of a response whose advantages are all exactly 0, as in a group of equal
    rewards, if the objective gives it no gradient: no divergence in the loss, no entropy bonus. The update and every
    denominator stay the same. Metrics over tokens (entropy, kl, ratio, clip_fraction, weight) are then over the
    computed tokens, whose share is trained_fraction; an update that could skip all responses computes the shortest one.
    The logprobs of skipped tokens are not recorded."""
    entropy_coef: Annotated[float | ValueSchedule | ClosedLoop, Schedulable(ge=0, of=("entropy",))] = addition(0.0)
    """Weight of the entropy bonus. The mean entropy of the policy at the sampled tokens, in nats, is added to the
    objective and averaged like the losses."""
    router_aux_loss_coef: float | None = addition(None, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (the metric `aux_loss`). The loss is over the sampled
    tokens that are trained on. The tokens of each expert are counted before the step's updates. If left out, the
    model's configuration applies: its router_aux_loss_coef if output_router_logits is true, else 0."""
    optimizer: Optimizer = Optimizer()
    """Optimizer of the updates."""
    schedule: Schedule = Schedule()
    """Schedule of the learning rate over the updates."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward; optimizer state and master weights stay float32. If left out: bfloat16 if the
    spec has `resources: {device: cuda}`, else float32, even if `device: auto` finds a GPU."""
    on_not_finite: Literal["stop", "skip"] = addition("stop")
    """Reaction to an update whose gradient norm is NaN or infinite. stop: the guard on not_finite acts, which ends the
    run. skip: the update is skipped, and weights and optimizer state stay unchanged, to the last bit; the learning
    rate's schedule counts it. After 20 skipped updates in a row, or if no update of the run succeeds, the guard
    acts."""
    guards: tuple[Guard, ...] = addition(())
    """Metrics to check, and the reaction to a value outside the bounds."""
    export_every_steps: int = Field(0, ge=0)
    """Steps between exports of weights for evaluation. 0 exports only the last step."""
    microbatch_tokens: int = execution(16384, ge=1)
    """Largest number of tokens, including padding, of one forward pass on a rank, or on the ranks that share it. A
    longer response gets its own pass, together with all its parts if an agent splits it. No effect on the gradient."""
    gradient_reduction: Literal["auto", "float32"] = addition("auto")
    """Type in which ranks add up their gradients. auto: that of the passes; see `precision`. float32: also for passes
    in bfloat16, which doubles the bytes between ranks and in a bucket, and avoids rounding of the sum. Its cost on
    several GPUs has not been measured."""
    packing: bool = execution(True)
    """Concatenate the responses of a pass instead of padding them, and compute a prompt once for all responses of its
    group in the pass. Needs a model whose attention can separate the sequences. No effect on the gradient."""
    ranks: int = execution(1, ge=1, le=MAX_RANKS)
    """Number of data-parallel processes. The batch stays the same and is split among them."""
    sequence_parallel_size: int = execution(1, ge=1)
    """Number of neighbouring ranks that share each sequence (DeepSpeed-Ulysses), for responses too long for one rank's
    memory. Each rank has only the activations of its part. Must divide ranks and the model's attention heads. No effect
    on the gradient."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], no_flag] = execution(0)
    """DeepSpeed ZeRO: 1 shards the optimizer, 2 the gradients as well, 3 the parameters as well. With 3, rank 0 reads
    the model into host memory, and no GPU has to hold all of it. In bfloat16, 0 and 1 run as 2, in which each rank
    accumulates its share of an update's gradients in float32; otherwise every rank would hold all of them in both
    types."""
    offload: Offload = execution(Offload())
    """State kept in host memory."""
    kernels: Literal["auto", "torch", "liger"] = execution("auto")
    """Kernels for norms, rotations and the gates of MLPs: PyTorch's operations, or Liger-Kernel's, which access memory
    less often (the extra `liger`; on GPUs, for models of type llama, qwen2 and qwen3). auto: Liger's if they are
    installed, support the model, and pass a test at the start that compares a tiny model's gradient with PyTorch's;
    else PyTorch's, and always on a CPU."""
    attention: Literal["auto", "torch"] = execution("auto")
    """Kernel for the attention of packed rows in bfloat16 on a GPU. torch: PyTorch's own. auto: FlashAttention 3 on
    Hopper GPUs, or 4 on Hopper and Blackwell GPUs, if the package is installed and passes a test at the start that
    compares a small row's attention and gradient with PyTorch's; else PyTorch's. No effect elsewhere."""
    gradient_checkpointing: bool | Literal["selective", "auto"] = execution(False)
    """Recompute activations in the backward pass, which costs a third more arithmetic. selective: recompute all except
    the results of matrix products and attention, which costs little. auto: the first of false, selective and true that
    fits a GPU of known memory (this machine's, or resources.memory_gib with device: cuda); false on a CPU, true on an
    unknown GPU. No effect on the gradient."""
    checkpoint: Checkpoint = execution(Checkpoint())
    """When the whole state is saved."""

    @property
    def deepspeed_stage(self) -> int:
        """Returns the ZeRO stage that DeepSpeed runs; see `zero_stage`."""
        return max(self.zero_stage, 2) if self.precision == "bfloat16" else self.zero_stage
