"""How responses are sampled, and how they are scored."""

from typing import Annotated, Literal

from pydantic import Field

from specs.schema.base import Spec, addition, execution, unless_said


class DynamicSampling(Spec):
    """DAPO's, arXiv:2503.14476: groups whose scores are all equal are thrown away, other prompts sampled instead."""

    max_batches: int = Field(10, ge=2)
    """Rounds of sampling in a step at most, the first included. What is missing then is filled with the first groups
    that were thrown away, so that a step always has prompts_per_step groups."""


class Correction(Spec):
    """Importance weights learner / engine on each token's loss, for the logprobs in which the two differ."""

    type: Literal["none", "truncate", "mask"] = "none"
    """none; truncate: min(ratio, bound), truncated importance sampling; mask: the ratio within [1 / bound, bound], 0
    outside."""
    bound: float = Field(2.0, gt=1)
    """Largest weight."""


class Overlong(Spec):
    """DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13: reward taken off as a response nears its limit."""

    buffer: int = Field(ge=1)
    """Tokens before rollout.max_response_length over which the penalty grows linearly from 0."""
    penalty: float = Field(1.0, gt=0)
    """Reward taken off at the limit."""


StopText = Annotated[str, Field(min_length=1)]


class _Rollout(Spec):
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it, in the sampler and wherever logprobs are taken."""
    top_p: float = addition(1.0, gt=0, le=1)
    """Nucleus: sample from the smallest set of tokens that holds this probability. rollout_logprobs are of the
    renormalised set, the learner's of all tokens."""
    top_k: int = addition(0, ge=0)
    """Sample from as many likeliest tokens, the nucleus taken of these; 0: all."""
    stop: tuple[StopText, ...] = addition(())
    """Texts that end a response. The token that completes one is its last, and counts as any other: the response's text
    holds the stop text, and what else that token says after it."""
    max_response_length: int = Field(256, ge=1)
    """Tokens of a response at most, the end-of-text token included."""
    dynamic_sampling: DynamicSampling | None = addition(None)
    """Sample until every group's scores vary; left out: take the groups as they come."""
    correction: Correction = addition(Correction())
    """For an engine whose logprobs differ from the learner's."""
    trust_logprobs: bool = addition(False)
    """Take the sampler's own logprobs for old_logprobs instead of computing them again with the learner, except for the
    first minibatch where its first pass gives them: not with schedule_free_adamw, nor with a divergence in the reward.
    The two are one policy; they differ by what sampler and learner differ in their arithmetic, which with engine vllm
    the sentinel holds below sentinel_tolerance."""
    max_staleness: int = addition(0, ge=0)
    """Steps. Above 0, the batch of step i is sampled while earlier ones are trained on, under the weights after step
    i - 1 - max_staleness, and old_logprobs are the sampler's own. Where that fails, the run ends after the step under
    way without a checkpoint of it, since only the sampler still had those weights; another attempt goes on from the one
    before. 0: under the weights that training on it begins from."""

    @property
    def gives_old_logprobs(self) -> bool:
        """Whether the sampler's own logprobs stand for old_logprobs."""
        return self.trust_logprobs or self.max_staleness > 0

    def gpus(self, ranks: int) -> int:
        """GPUs that a machine needs for so many ranks and their engines."""
        return ranks


class TransformersRollout(_Rollout):
    """Sampling with transformers in the trainer's own process, over the learner's own weights."""

    engine: Literal["transformers"] = "transformers"
    max_concurrent: int = execution(256, ge=1)
    """Responses in flight at once on a rank."""


class VllmRollout(_Rollout):
    """Sampling with vLLM, an engine for each rank; new weights are loaded and proven after each step."""

    engine: Literal["vllm"] = "vllm"
    placement: Literal["colocated", "dedicated"] = execution("colocated")
    """colocated: the engine lives in the trainer's process and shares its GPU; dedicated: in a process of its own, on
    GPUs of its own."""
    engine_gpus: tuple[Annotated[int, Field(ge=0)], ...] = execution(())
    """Where dedicated engines run: tensor_parallel_size GPUs for each rank of the machine, by their places among those
    that the run has there, from 0, the ranks' own first; empty: those after them. A rank's own GPU may be shared with
    it."""
    tensor_parallel_size: int = execution(1, ge=1)
    """GPUs (on a CPU: processes) over which a dedicated engine spreads each weight matrix."""
    enable_prefix_caching: bool = execution(True)
    """Keep the states of a prompt for its further responses."""
    sleep: bool = execution(False)
    """A colocated engine gives its GPU memory to the learner while it does not sample; the weights wait in host
    memory."""
    max_concurrent: int = execution(256, ge=1)
    """vLLM's max_num_seqs."""
    memory_fraction: float = execution(0.4, gt=0, lt=1)
    """Share of a GPU's memory for vLLM (its gpu_memory_utilization)."""
    cpu_cache_gib: float = execution(1.0, gt=0)
    """KV cache in GiB where the engine runs on a CPU."""
    sentinel_tolerance: float | None = execution(None, gt=0)
    """Nats: after each load, the largest difference allowed between the engine's and the learner's logprobs of the
    probe. Left out: 0.05 in float32 on a CPU, else 0.5, since arithmetic in bfloat16 alone moves the logprob of an
    unlikely token by 0.1 and more. The difference found, over all ranks, is the metric sentinel/difference of the step
    that the load ends."""

    def gpus(self, ranks: int) -> int:
        """Those of dedicated engines among them."""
        if self.placement == "colocated":
            return ranks
        wanted = ranks * self.tensor_parallel_size
        return max(ranks, *(place + 1 for place in self.engine_gpus[:wanted] or (ranks + wanted - 1,)))


Rollout = Annotated[
    TransformersRollout | VllmRollout, Field(discriminator="engine"), unless_said("engine", "transformers")
]


class Reward(Spec):
    """The scorer of a response. One that raises or hangs costs its response a recorded failure and reward 0."""

    type: Literal["math_verify", "math_dapo", "reasoning_gym", "exact_match"]
    """math_verify: mathematical equality, 1 or 0; math_dapo: DAPO's rule, 1 or -1; reasoning_gym: the task's own
    scorer, 0 to 1; exact_match: the stripped texts are equal, 1 or 0."""
    overlong: Overlong | None = addition(None)
    """A penalty on long responses, added to the score; left out: none."""
    timeout_seconds: float = execution(10.0, gt=0)
    """A scorer is stopped after so long on one response."""
