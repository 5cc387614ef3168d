"""Needs of a run, estimated before it starts: its batch algebra, its tokens, and the memory of one rank.

From the spec alone; nothing is loaded. Counts of tokens are upper bounds, memory is known to a tenth.
Sizes are in bytes unless a name says otherwise.
"""

from dataclasses import dataclass, replace

from pipelines.planning.judging import scoring_memory
from pipelines.planning.model_shape import teacher_shape
from rpg.base.shape import ModelShape
from specs.schema.experiment import Experiment
from specs.schema.rollout import TurnBounds
from specs.schema.training import Lora, Training

GIB = 2**30
LOGITS = 2**26
"""Logits that the learner holds at once, of as many response tokens as that makes; in float32."""
LIVE_PARAMETERS = 10**9
"""Most weights that DeepSpeed holds whole at ZeRO 3, by its default (stage3_max_live_parameters)."""
RECORDED_TOKEN = 24
"""Bytes on disk of a row of `tokens`, whose logprobs, ratio and entropy hardly compress."""
TOKENS_ON_GPU = 2048
"""On a GPU the logits of so many tokens at least."""
REDUCED_PARAMETERS = 5 * 10**8
"""Gradients that ZeRO adds up over the ranks at once, by its default (reduce_bucket_size); room for all is taken at the
start."""
PREFETCHED_PARAMETERS = 5 * 10**7
"""Most weights that ZeRO 3 gathers ahead at once, by its default (stage3_prefetch_bucket_size), into a buffer of their
own."""


@dataclass(frozen=True, slots=True)
class BatchAlgebra:
    """How a step's rollouts become optimizer updates."""

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    minibatches: int
    rollouts_per_update: int
    updates_per_step: int
    updates: int
    tokens_to_sample: int
    """Most response tokens of the whole run's training: every response at its full length, every group that may be
    thrown away and sampled again counted."""
    tokens_given: int
    """Most tokens that the environment gives in the same responses. Both together are bounded by the responses'
    length."""
    tokens_to_train: int
    """Most prompt and response tokens of all forward-backward passes."""
    recorded_bytes: int
    """Bytes on disk of the whole run's rows of `tokens`, every response at its full length."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank's device where they are most, to a tenth, by what they hold."""

    weights: int
    gradients: int
    buckets: int
    """Room in which ZeRO adds gradients up over the ranks; twice where the backward pass goes on meanwhile. With the
    optimizer on the host also room for the largest weight's gradient on its way there."""
    optimizer: int
    reference: int
    sampler: int
    """The sampler's own model, whole on every rank; 0 where it reads the learner's, or has it in `kv_cache`."""
    gathered: int
    """Weights that ZeRO 3 gathers for the layers that compute and for the next ones."""
    activations: int
    logits: int
    """Logits of a chunk of tokens, and the gradient of the output head, which is added up over the chunks in
    float32."""
    kv_cache: int
    """For an engine that takes a share of a known memory, the share, its weights included. 0 on GPUs of its own."""
    cache_stays: bool = False
    """Whether `kv_cache` is held while training too: by an engine that does not sleep, or that samples meanwhile."""
    scoring: int = 0
    """Models that score on the rank's GPU: a judge, a classifier."""
    away: int = 0
    """Bytes of the parts above that are in host memory while rollouts are sampled."""

    @property
    def total(self) -> int:
        """Sum of the parts; where sampling and training take turns, that of the turn which needs more."""
        fixed = (
            self.weights + self.gradients + self.buckets + self.optimizer + self.reference + self.sampler + self.scoring
        )
        training = self.gathered + self.activations + self.logits
        return fixed + (training + self.kv_cache if self.cache_stays else max(training, self.kv_cache - self.away))

    @property
    def only_for_updates(self) -> int:
        """Memory that `training.offload.while_sampling` moves to the host, or DeepSpeed frees by then."""
        return self.gradients + self.buckets + self.optimizer


def turn_bounds(experiment: Experiment, max_response_length: int = 0) -> TurnBounds:
    """Most that a response holds. Of an environment that does not say so, any token of it may be sampled or given.

    Args:
        max_response_length: of a response; 0: that of training.
    """
    longest = max_response_length or experiment.rollout.max_response_length
    stated = experiment.rollout.rollouter.bounds(longest)
    return stated or TurnBounds(turns=longest, sampled=longest, given=longest - 1, length=longest)


def longest_sequence(experiment: Experiment) -> int:
    """Most tokens of a prompt and its response."""
    return experiment.data.max_prompt_length + turn_bounds(experiment).length


def batch_algebra(experiment: Experiment) -> BatchAlgebra:
    """The counts of one run."""
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
    """One rank's device memory; weights, gradients and optimizer state are divided as the ZeRO stage says."""
    training, rollout = experiment.training, experiment.rollout
    low_precision = training.precision == "bfloat16"
    size = 2 if low_precision else 4
    adapters = adapter_parameters(shape, training.lora) if training.lora else 0
    trained = adapters or shape.parameters
    stage = training.deepspeed_stage
    # Either optimizer keeps two float32 values a weight, and ZeRO a float32 master copy of the weights as well.
    optimizer = trained * (12 if stage else 8)
    weights = (shape.parameters + adapters) * size
    # A snapshot keeps the trained weights; with adapters the initial policy is the model with these off. A teacher is a
    # model of its own.
    teacher = teacher_shape(experiment)
    of_teacher = teacher.parameters if teacher else 0
    kept = {"behaviour": 0, "initial": 0 if adapters else trained, "snapshot": trained, "model": of_teacher}
    update = experiment.reference.update
    # An average is kept in float32; a copy in the training precision is lent to the learner.
    averages = low_precision and update is not None and update.ema_decay > 0
    reference = kept[experiment.reference.source] * (4 + size if averages else size)
    tokens = _largest_microbatch(experiment)
    least = 1 if experiment.resources.device == "cpu" else TOKENS_ON_GPU
    chunk = min(tokens, max(least, LOGITS // shape.vocab_size))
    logits = _logits(shape, chunk, size, has_gradient=not adapters)
    share = engine_memory(experiment)
    elsewhere = experiment.gpus > training.ranks
    estimate = MemoryEstimate(
        weights=0 if training.offload.parameters else _shard(weights, training, 3),
        # Gradients are added up in float32; from stage 2 on a rank keeps its share of them.
        gradients=trained * 4 // (training.ranks if stage > 1 else 1),
        buckets=_buckets(trained, experiment, size) + _staged(shape, training) * size if stage else 0,
        optimizer=0 if training.offload.optimizer else optimizer // (training.ranks if stage else 1),
        reference=_shard(reference, training, 3),
        sampler=0 if rollout.memory_share or rollout.reads_learner(training.zero_stage) else shape.parameters * size,
        gathered=_gathered(max(shape.parameters + adapters, of_teacher), training) * size,
        activations=_activations(shape, training, tokens, size, logits),
        logits=logits,
        kv_cache=0 if elsewhere else share or wanted_cache(experiment, shape),
        scoring=scoring_memory(experiment),
        cache_stays=not elsewhere and ((share > 0 and not rollout.sleeps) or rollout.max_staleness > 0),
    )
    moves = training.offload.leaves_while_sampling and experiment.resources.device != "cpu"
    return replace(estimate, away=estimate.only_for_updates) if moves else estimate


def in_flight(experiment: Experiment) -> int:
    """Responses that a sampler has under way at once, at most."""
    training = experiment.training
    of_sampler = -(-training.prompts_per_step * training.group_size // experiment.samplers)
    return min(experiment.rollout.max_concurrent, of_sampler)


def wanted_cache(experiment: Experiment, shape: ModelShape) -> int:
    """Bytes of the KV cache of all responses that are under way at once, each at its full length."""
    size = experiment.rollout.cache_bytes or (2 if experiment.training.precision == "bfloat16" else 4)
    return in_flight(experiment) * longest_sequence(experiment) * shape.layers * 2 * shape.key_value_size * size


def engine_memory(experiment: Experiment) -> int:
    """Bytes of a GPU that the sampler takes for weights and cache together; 0: as much as these need, or unknown."""
    return int(experiment.rollout.memory_share * experiment.resources.memory_gib * GIB)


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Weights of the adapters: rank x (inputs + outputs) of each adapted module."""
    widths = shape.linear_widths
    return lora.rank * sum(widths.get(name, 0) for name in lora.target_modules or widths)


def _buckets(trained: int, experiment: Experiment, size: int) -> int:
    training = experiment.training
    if training.gradient_reduction == "float32":
        size = 4
    if experiment.resources.device == "cpu":  # where memory that is not written to takes no room
        return min(trained, REDUCED_PARAMETERS) * size
    overlaps = training.ranks > 1 and training.deepspeed_stage == 2 and not training.lora
    return REDUCED_PARAMETERS * size * (2 if overlaps else 1)


def _staged(shape: ModelShape, training: Training) -> int:
    """Elements of the buffer through which gradients go to an optimizer on the host: the largest trained weight's. At
    ZeRO 3 there is none."""
    if not training.offload.optimizer or training.deepspeed_stage == 3:
        return 0
    if training.lora:
        return training.lora.rank * max(shape.hidden_size, shape.attention_size, shape.intermediate_size)
    return shape.largest_weight


def _shard(size: int, training: Training, from_stage: int) -> int:
    return size // training.ranks if training.zero_stage >= from_stage else size


def _gathered(parameters: int, training: Training) -> int:
    """Most weights that are whole at once. A single rank gathers none, unless they come from the host."""
    if training.zero_stage < 3 or (training.ranks == 1 and not training.offload.parameters):
        return 0
    return min(parameters, LIVE_PARAMETERS) + min(parameters, PREFETCHED_PARAMETERS)


def _largest_microbatch(experiment: Experiment) -> int:
    """Tokens of a rank's part of it, where ranks share their rows."""
    longest, training = longest_sequence(experiment), experiment.training
    per_update = training.prompts_per_step * training.group_size // training.minibatches * longest
    # A single response that is longer than the budget still is one microbatch.
    groups = training.ranks // training.sequence_parallel_size
    row = max(min(training.microbatch_tokens, -(-per_update // groups)), longest)
    return -(-row // training.sequence_parallel_size)


def _activations(shape: ModelShape, training: Training, tokens: int, size: int, logits: int) -> int:
    """Activations kept for the backward pass, and the work on one layer in it, for which the logits' room is free by
    then.

    Recomputation keeps each layer's input, and works on the whole of one layer, or on what it did not keep of it.
    """
    fused = training.kernels == "liger"  # with auto that is known where it trains; without it memory is more
    layer, kept, recomputed = _layer_activations(shape, size, fused=fused), shape.hidden_size * size, 0
    match training.gradient_checkpointing:
        case False:
            kept = layer
        case True:
            recomputed = layer
        case "selective":
            results, again = _product_activations(shape, size, fused=fused)
            kept, recomputed = kept + results, layer - again
    work = recomputed + 2 * shape.intermediate_size * size  # the MLP's gradients
    last_norm = _norm_activations(shape, size, fused=fused)
    return tokens * (shape.layers * kept + last_norm) + max(0, tokens * work - logits)


def _layer_activations(shape: ModelShape, size: int, *, fused: bool) -> int:
    """Bytes of one layer and token that autograd saves in transformers' modules, or with `fused` in Liger's kernels."""
    width, keys = shape.attention_size, shape.key_value_size
    norms = 2 * _norm_activations(shape, size, fused=fused)
    if shape.norms_queries:  # what comes out of them is turned before it is kept, as the attention's own input
        norms += (size if fused else 4 + size) * (width + keys)
    # Queries, keys, values, what the attention gives, and that in the order in which the next product takes it.
    attention = size * (width + 2 * keys + 2 * width)
    # With a gate: both products, the gate's activation (not if fused) and what is made of the two. Else GELU, in steps.
    mlp = (4 - fused if shape.is_gated else 5) * shape.intermediate_size * size
    # What enters each of a token's experts, and what comes out, which is weighted.
    experts = shape.experts_per_token * shape.hidden_size * (4 + size)
    return norms + attention + mlp + experts


def _product_activations(shape: ModelShape, size: int, *, fused: bool) -> tuple[int, int]:
    """Bytes of one layer and token that the results of its matrix products and attention take; of these the bytes that
    autograd saves as they are: values, the attention's result, what enters the MLP's activation, and what a norm of
    queries and keys takes, unless it has to be converted first."""
    inner = (2 if shape.is_gated else 1) * shape.intermediate_size
    turned = shape.attention_size + shape.key_value_size
    saved = shape.key_value_size + shape.attention_size + inner
    if shape.norms_queries and (fused or size == 4):
        saved += turned
        turned = 0
    return size * (saved + turned + 2 * shape.hidden_size), size * saved


def _norm_activations(shape: ModelShape, size: int, *, fused: bool) -> int:
    """An RMS norm keeps its input in float32, and what it normalised before and after its weight; if fused, and as
    GPT-2's LayerNorm does, its input and its output."""
    return shape.hidden_size * (4 + 2 * size if shape.is_gated and not fused else 2 * size)


def _logits(shape: ModelShape, chunk: int, size: int, *, has_gradient: bool) -> int:
    """Two blocks of a chunk; with the head's gradient, that in float32 and, where the weights are of another type, in
    theirs."""
    blocks = chunk * shape.vocab_size * 4 * 2
    head = shape.vocab_size * shape.hidden_size * (4 + (size if size < 4 else 0))
    return blocks + (head if has_gradient else 0)
