"""Estimates of a run before it starts: its batch arithmetic, its tokens, and the memory of one rank.

Computed from the spec alone; nothing is loaded. Counts of tokens are upper bounds, memory is accurate to a tenth. Sizes
are in bytes unless a name says otherwise.
"""

from dataclasses import dataclass, replace

from pipelines.planning.judging import scoring_memory
from pipelines.planning.model_shape import teacher_shape
from rpg.base.shape import ModelShape
from specs.schema.experiment import Experiment
from specs.schema.rollout import TurnBounds
from specs.schema.schedule import largest
from specs.schema.training import Lora, Training

GIB = 2**30
LOGITS = 2**26
"""Largest number of logits that the learner holds at once, in float32. It limits the response tokens in a chunk."""
LIVE_PARAMETERS = 10**9
"""Largest number of weights that DeepSpeed keeps gathered at ZeRO 3, by its default (stage3_max_live_parameters)."""
RECORDED_TOKEN = 24
"""Bytes on disk of a row of `tokens`, whose logprobs, ratio and entropy hardly compress."""
TOKENS_ON_GPU = 2048
"""Smallest number of tokens whose logits are held at once on a GPU."""
REDUCED_PARAMETERS = 5 * 10**8
"""Number of gradients that ZeRO reduces over the ranks at once, by its default (reduce_bucket_size). Memory for all of
them is allocated at the start."""
PREFETCHED_PARAMETERS = 5 * 10**7
"""Largest number of weights that ZeRO 3 gathers ahead at once, by its default (stage3_prefetch_bucket_size), into a
separate buffer."""


@dataclass(frozen=True, slots=True)
class BatchAlgebra:
    """The way a step's rollouts become optimizer updates."""

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    minibatches: int
    rollouts_per_update: int
    updates_per_step: int
    updates: int
    tokens_to_sample: int
    """Largest number of response tokens in the whole training: every response has its full length, and all groups that
    may be discarded and sampled again are included."""
    tokens_given: int
    """Largest number of tokens that the environment gives in the same responses. The responses' length bounds the sum
    of sampled and given tokens."""
    tokens_to_train: int
    """Largest number of prompt and response tokens of all forward-backward passes."""
    recorded_bytes: int
    """Bytes on disk of the whole run's rows of `tokens`, if every response has its full length."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak bytes on one rank's device, by content, accurate to a tenth."""

    weights: int
    gradients: int
    buckets: int
    """Buffers in which ZeRO reduces gradients over the ranks; two if the backward pass overlaps the reduction. If the
    optimizer is on the host, also the buffer through which the largest weight's gradient goes there."""
    optimizer: int
    reference: int
    sampler: int
    """The sampler's own model, whole on every rank. 0 if the sampler uses the learner's model, or if `kv_cache`
    includes it."""
    gathered: int
    """Weights that ZeRO 3 gathers for the current layers and the next ones."""
    activations: int
    logits: int
    """Logits of a chunk of tokens, and the gradient of the output head, summed over the chunks in float32."""
    distributions: int
    """The reference's distributions at a step's tokens, if a divergence is summed over the vocabulary. They are stored
    as hidden states, with a copy of the output head if it changes or is gathered, or as the most likely tokens. 0
    without such a divergence."""
    kv_cache: int
    """If the engine takes a share of a known memory, that share, which includes its weights. 0 if the engine has its
    own GPUs."""
    cache_stays: bool = False
    """Whether `kv_cache` stays allocated during training, because the engine does not sleep or samples meanwhile."""
    scoring: int = 0
    """Models that score on the rank's GPU, such as a judge or a classifier."""
    away: int = 0
    """Bytes of the parts above that are in host memory while rollouts are sampled."""

    @property
    def total(self) -> int:
        """Returns the sum of the parts, or the larger turn if sampling and training take turns."""
        fixed = (
            self.weights + self.gradients + self.buckets + self.optimizer + self.reference + self.sampler + self.scoring
        )
        training = self.for_passes
        return fixed + (training + self.kv_cache if self.cache_stays else max(training, self.kv_cache - self.away))

    @property
    def for_passes(self) -> int:
        """Returns the memory that only the passes of training need."""
        return self.gathered + self.activations + self.logits + self.distributions

    @property
    def only_for_updates(self) -> int:
        """Returns the memory that is off the device while rollouts are sampled: `training.offload.while_sampling` moves
        it to the host, or DeepSpeed has freed it."""
        return self.gradients + self.buckets + self.optimizer


def turn_bounds(experiment: Experiment, max_response_length: int = 0) -> TurnBounds:
    """Returns the largest numbers of sampled and given tokens of a response. If an environment sets no bounds, any
    token may be either.

    Args:
        max_response_length: bound of a response in tokens; 0: that of training.
    """
    longest = max_response_length or experiment.rollout.max_response_length
    stated = experiment.rollout.rollouter.bounds(longest)
    return stated or TurnBounds(turns=longest, sampled=longest, given=longest - 1, length=longest)


def longest_sequence(experiment: Experiment) -> int:
    """Returns the largest number of tokens of a prompt and its response."""
    return experiment.data.max_prompt_length + turn_bounds(experiment).length


def batch_algebra(experiment: Experiment) -> BatchAlgebra:
    """Returns the counts of one run."""
    training = experiment.training
    rollouts = training.prompts_per_step * training.group_size
    updates_per_step = training.minibatches * training.epochs
    bounds, dynamic = turn_bounds(experiment), experiment.rollout.dynamic_sampling
    sampled = training.steps * rollouts * (dynamic.max_batches if dynamic else 1)
    return BatchAlgebra(
        prompts_per_step=training.prompts_per_step,
        group_size=training.group_size,
        rollouts_per_step=rollouts,
        minibatches=training.minibatches,
        rollouts_per_update=rollouts // training.minibatches,
        updates_per_step=updates_per_step,
        updates=updates_per_step * training.steps,
        tokens_to_sample=sampled * bounds.sampled,
        tokens_given=sampled * bounds.given,
        tokens_to_train=training.steps * rollouts * training.epochs * longest_sequence(experiment),
        recorded_bytes=int(training.steps * rollouts * bounds.length * experiment.record.share * RECORDED_TOKEN),
    )


def memory_estimate(experiment: Experiment, shape: ModelShape) -> MemoryEstimate:
    """Returns one rank's device memory. The ZeRO stage decides which of weights, gradients and optimizer state are
    partitioned."""
    training, rollout = experiment.training, experiment.rollout
    low_precision = training.precision == "bfloat16"
    size = 2 if low_precision else 4
    adapters = adapter_parameters(shape, training.lora) if training.lora else 0
    trained = adapters or shape.parameters
    stage = training.deepspeed_stage
    # Either optimizer keeps two float32 values a weight, and ZeRO a float32 master copy of the weights as well.
    optimizer = trained * (12 if stage else 8)
    weights = (shape.parameters + adapters) * size
    # A snapshot keeps the trained weights; with adapters the initial policy is the model without them. A teacher is a
    # separate model.
    teacher = teacher_shape(experiment)
    of_teacher = teacher.parameters if teacher else 0
    kept = {"behaviour": 0, "initial": 0 if adapters else trained, "snapshot": trained, "model": of_teacher}
    update = experiment.reference.update
    # An average is kept in float32; the learner uses a copy in the training precision.
    averages = low_precision and update is not None and largest(update.ema_decay) > 0
    reference = kept[experiment.reference.source] * (4 + size if averages else size)
    tokens = _largest_microbatch(experiment)
    least = 1 if experiment.resources.device == "cpu" else TOKENS_ON_GPU
    chunk = min(tokens, max(least, LOGITS // shape.vocab_size))
    logits = _logits(shape, chunk, size, has_gradient=not adapters)
    logits += _compared_logits(experiment, (teacher or shape).vocab_size, chunk)
    share = engine_memory(experiment)
    elsewhere = experiment.gpus > training.ranks
    estimate = MemoryEstimate(
        weights=0 if training.offload.parameters else _shard(weights, training, 3),
        # Gradients are summed in float32; from stage 2 on a rank keeps its share of them.
        gradients=trained * 4 // (training.ranks if stage > 1 else 1),
        buckets=_buckets(trained, experiment, size) + _staged(shape, training) * size if stage else 0,
        optimizer=0 if training.offload.optimizer else optimizer // (training.ranks if stage else 1),
        reference=_shard(reference, training, 3),
        sampler=0
        if elsewhere or rollout.memory_share or rollout.reads_learner(training.zero_stage)
        else shape.parameters * size,
        gathered=_gathered(max(shape.parameters + adapters, of_teacher), training) * size,
        activations=_activations(shape, training, tokens, size, logits),
        logits=logits,
        distributions=_distributions(experiment, teacher or shape, size),
        kv_cache=0 if elsewhere else share or wanted_cache(experiment, shape),
        scoring=scoring_memory(experiment),
        cache_stays=not elsewhere and ((share > 0 and not rollout.sleeps) or rollout.max_staleness > 0),
    )
    moves = training.offload.leaves_while_sampling and experiment.resources.device != "cpu"
    return replace(estimate, away=estimate.only_for_updates) if moves else estimate


def _compared_logits(experiment: Experiment, vocabulary: int, chunk: int) -> int:
    """Returns the bytes that a divergence over the vocabulary takes for a chunk, in addition to the policy's logits:
    the reference's logits and, for the Jensen-Shannon divergence, two more blocks of this size."""
    objective = experiment.objective
    if objective.summed_over != "full":
        return 0
    return (3 if objective.claim_divergence == "jensen_shannon" else 1) * chunk * vocabulary * 4


def _distributions(experiment: Experiment, reference: ModelShape, size: int) -> int:
    """Returns the bytes of the reference's distributions at all tokens of a step that a rank trains on."""
    training, objective = experiment.training, experiment.objective
    if objective.summed_over == "sampled":
        return 0
    tokens = -(-training.prompts_per_step * training.group_size // training.ranks) * turn_bounds(experiment).sampled
    if objective.summed_over == "top_k":  # an id of 8 bytes and a logprob in float32
        return tokens * min(objective.top_k, reference.vocab_size) * 12
    changes = experiment.reference.source == "behaviour" and training.lora is None
    head = reference.vocab_size * reference.hidden_size if changes or training.zero_stage == 3 else 0
    return (tokens * reference.hidden_size + head) * size


def in_flight(experiment: Experiment) -> int:
    """Returns the largest number of responses that a sampler has in flight at once."""
    training = experiment.training
    of_sampler = -(-training.prompts_per_step * training.group_size // experiment.samplers)
    return min(experiment.rollout.max_concurrent, of_sampler)


def wanted_cache(experiment: Experiment, shape: ModelShape) -> int:
    """Returns the bytes of the KV cache of all responses that are in flight at once, each at its full length."""
    size = experiment.rollout.cache_bytes or (2 if experiment.training.precision == "bfloat16" else 4)
    return in_flight(experiment) * longest_sequence(experiment) * shape.layers * 2 * shape.key_value_size * size


def engine_memory(experiment: Experiment) -> int:
    """Returns the bytes of a GPU that the sampler takes for weights and cache together. 0 if it takes as much as these
    need, or if unknown."""
    return int(experiment.rollout.memory_share * experiment.resources.memory_gib * GIB)


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Returns the number of the adapters' weights: rank x (inputs + outputs) of each adapted module."""
    widths = shape.linear_widths
    return lora.rank * sum(widths.get(name, 0) for name in lora.target_modules or widths)


def _buckets(trained: int, experiment: Experiment, size: int) -> int:
    training = experiment.training
    if training.gradient_reduction == "float32":
        size = 4
    if experiment.resources.device == "cpu":  # untouched memory takes no space there
        return min(trained, REDUCED_PARAMETERS) * size
    overlaps = training.ranks > 1 and training.deepspeed_stage == 2 and not training.lora
    return REDUCED_PARAMETERS * size * (2 if overlaps else 1)


def _staged(shape: ModelShape, training: Training) -> int:
    """Returns the number of elements in the buffer through which gradients go to an optimizer on the host, as many as
    the largest trained weight has. 0 at ZeRO 3, which has no such buffer."""
    if not training.offload.optimizer or training.deepspeed_stage == 3:
        return 0
    if training.lora:
        return training.lora.rank * max(shape.hidden_size, shape.attention_size, shape.intermediate_size)
    return shape.largest_weight


def _shard(size: int, training: Training, from_stage: int) -> int:
    return size // training.ranks if training.zero_stage >= from_stage else size


def _gathered(parameters: int, training: Training) -> int:
    """Returns the largest number of weights that are gathered at once. A single rank gathers none, unless they come
    from the host."""
    if training.zero_stage < 3 or (training.ranks == 1 and not training.offload.parameters):
        return 0
    return min(parameters, LIVE_PARAMETERS) + min(parameters, PREFETCHED_PARAMETERS)


def _largest_microbatch(experiment: Experiment) -> int:
    """Returns the tokens of a rank's part of the largest microbatch. Ranks may share a row."""
    longest, training = longest_sequence(experiment), experiment.training
    per_update = training.prompts_per_step * training.group_size // training.minibatches * longest
    # A single response above the budget is still one microbatch.
    groups = training.ranks // training.sequence_parallel_size
    row = max(min(training.microbatch_tokens, -(-per_update // groups)), longest)
    return -(-row // training.sequence_parallel_size)


def _activations(shape: ModelShape, training: Training, tokens: int, size: int, logits: int) -> int:
    """Returns the bytes of activations kept for the backward pass, and of the temporary memory for one layer in it. The
    logits' memory is free by then and can be used for the latter.

    Recomputation keeps each layer's input, and works on the whole of one layer, or on the parts of it that were not
    kept.
    """
    fused = training.kernels == "liger"  # `auto` is decided on the training machine; without Liger, memory is higher
    layer, kept, recomputed = _layer_activations(shape, size, fused=fused), shape.hidden_size * size, 0
    match training.gradient_checkpointing:
        case False:
            kept = layer
        case True | "auto":  # a plan that knows the memory has chosen
            recomputed = layer
        case "selective":
            results, again = _product_activations(shape, size, fused=fused)
            kept, recomputed = kept + results, layer - again
    work = recomputed + 2 * shape.intermediate_size * size  # the MLP's gradients
    last_norm = _norm_activations(shape, size, fused=fused)
    return tokens * (shape.layers * kept + last_norm) + max(0, tokens * work - logits)


def _layer_activations(shape: ModelShape, size: int, *, fused: bool) -> int:
    """Returns the bytes of one layer and token that autograd saves in transformers' modules, or with
    `fused` in Liger's kernels."""
    width, keys = shape.attention_size, shape.key_value_size
    norms = 2 * _norm_activations(shape, size, fused=fused)
    if shape.norms_queries:  # their output is rotated before it is kept as the attention's own input
        norms += (size if fused else 4 + size) * (width + keys)
    # Queries, keys, values, the attention's result, and its copy in the layout that the next product needs.
    attention = size * (width + 2 * keys + 2 * width)
    # With a gate: both products, the gate's activation (not if fused) and the product of the two. Else GELU, in steps.
    mlp = (4 - fused if shape.is_gated else 5) * shape.intermediate_size * size
    # The input of each of a token's experts, and its output, which is weighted.
    experts = shape.experts_per_token * shape.hidden_size * (4 + size)
    return norms + attention + mlp + experts


def _product_activations(shape: ModelShape, size: int, *, fused: bool) -> tuple[int, int]:
    """Returns, for one layer and token, the bytes of the results of matrix products and attention, and how many of
    these bytes autograd saves unchanged: values, the attention's result, the input of the MLP's activation, and the
    input of a norm of queries and keys unless it must be converted first."""
    inner = (2 if shape.is_gated else 1) * shape.intermediate_size
    turned = shape.attention_size + shape.key_value_size
    saved = shape.key_value_size + shape.attention_size + inner
    if shape.norms_queries and (fused or size == 4):
        saved += turned
        turned = 0
    return size * (saved + turned + 2 * shape.hidden_size), size * saved


def _norm_activations(shape: ModelShape, size: int, *, fused: bool) -> int:
    """Returns the bytes of a norm. An RMS norm keeps its input in float32, and the normalised values before and after
    its weight. A fused norm and GPT-2's LayerNorm keep input and output."""
    return shape.hidden_size * (4 + 2 * size if shape.is_gated and not fused else 2 * size)


def _logits(shape: ModelShape, chunk: int, size: int, *, has_gradient: bool) -> int:
    """Returns the bytes of two blocks of a chunk, and of the head's gradient if there is one, which is stored in
    float32 and, if the weights have another type, in that type too."""
    blocks = chunk * shape.vocab_size * 4 * 2
    head = shape.vocab_size * shape.hidden_size * (4 + (size if size < 4 else 0))
    return blocks + (head if has_gradient else 0)
