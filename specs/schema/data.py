"""Where problems come from, how they become prompts, and what is filtered out."""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from specs.errors import Issue
from specs.schema.base import OpenSection, Spec, addition, unless_said
from specs.schema.reward import Reward


class Source(OpenSection):
    """Where problems come from."""

    tag: ClassVar[str] = "source"
    group: ClassVar[str] = "rpg.data"
    package: ClassVar[str] = "rpg.data.sources"
    generated: ClassVar[bool] = False
    """Whether a program makes up its problems. Many are alike then, and they are told apart by their prompts alone."""

    answered: ClassVar[bool] = True
    """Whether the policy answers its problems, and a reward scores the answers. Other sets are for evaluation only; the
    likelihood of their texts is their score."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Metrics of a set that is not answered; empty where its file or its package decides them."""

    source: str
    """Name of the kind of source."""
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """What the set is called in evaluations and tables; an evaluation set needs one.
    Empty: the task's, the file's or the dataset's own name."""
    limit: int = Field(0, ge=0)
    """Keep the first so many problems after deduplication; 0 keeps all."""
    reward: Reward | None = None
    """How responses to the set's problems are scored; left out: as the experiment's `reward` says."""

    def identity(self) -> dict[str, Any]:
        """See Spec. The problems are the same, whatever scores them."""
        plain = super().identity()
        del plain["reward"]
        return plain

    @abstractmethod
    def read(self) -> Iterator[Any]:
        """The set's problems as `rpg.data.SourceProblem`s, always in the same order.

        Raises:
            SpecError: what the source names is wrong; the paths of its issues are relative to the source.
        """

    def peek(self, count: int) -> Iterator[Any]:
        """The first problems, for a check before anything runs; none where even these would take long to read.

        Raises:
            SpecError: as `read`.
        """
        return islice(self.read(), count)

    def is_here(self) -> bool:
        """Whether its problems can be read without a download; asks no network."""
        return True

    def shared_with(self, other: "Source") -> Issue | None:  # noqa: ARG002 (for those that override it)
        """Why the set must hold problems of the other one, if that follows from the settings; at a path of this one."""
        return None


class TemplatePrompt(Spec):
    """The prompt is a text with fields filled in."""

    type: Literal["template"] = "template"
    template: str = "{prompt}"
    """Fields: {prompt} (the problem's text), {metadata.NAME} (what reasoning-gym says of the item)."""


class ChatPrompt(Spec):
    """The prompt is rendered with the tokenizer's own chat template."""

    type: Literal["chat"] = "chat"
    system: str = ""
    """System message put before the problem's own messages; empty: none."""
    template: str = addition("{prompt}")
    """The user message of a problem that comes as plain text, with the fields of a template prompt. Problems that come
    as messages already have theirs."""
    enable_thinking: bool | Literal["unset"] = False
    """Passed to templates that know it (Qwen3's, which at false put an empty thought before the response). unset: not
    passed, so that the template's own default holds."""


Prompt = Annotated[TemplatePrompt | ChatPrompt, Field(discriminator="type"), unless_said("type", "template")]


class ShuffledOrder(Spec):
    """The problems again and again, each pass over them in an order of its own."""

    type: Literal["shuffled"] = "shuffled"


class DifficultyOrder(Spec):
    """Problems by how often the policy has solved them so far, in three pools: hard, medium and easy. The medium ones
    are drawn, since a group of theirs is likely to have right and wrong responses; the others now and then."""

    type: Literal["difficulty"] = "difficulty"
    hard_below: float = Field(0.1, ge=0, le=1)
    """Success rate below which a problem is hard."""
    easy_above: float = Field(0.9, ge=0, le=1)
    """Success rate above which a problem is easy."""
    explore: float = Field(0.5, gt=0, le=1)
    """Share of the prompts drawn outside the medium pool: problems not yet tried first, in the shuffled order, then
    hard and easy ones, those tried longest ago first. Where the medium pool has too few, the others take their
    places."""
    memory: float = Field(0.5, ge=0, lt=1)
    """Share of its earlier success rate that a problem keeps when another group of its responses is scored."""

    @model_validator(mode="after")
    def _in_order(self) -> "DifficultyOrder":
        if self.hard_below >= self.easy_above:
            raise ValueError("hard_below must be less than easy_above: between the two is the medium pool")
        return self


Order = Annotated[ShuffledOrder | DifficultyOrder, Field(discriminator="type")]


class Data(Spec):
    """Training and evaluation problems."""

    train: tuple[Source, ...] = Field(min_length=1)
    """Sets to train on, put one after another."""
    evaluation: tuple[Source, ...] = ()
    """Named sets to evaluate on; none may share a problem with the training sets."""
    order: Order = addition(ShuffledOrder())
    """Which training problem comes next: shuffled, or by difficulty."""
    prompt: Prompt = TemplatePrompt()
    """How a problem becomes the text that the model sees."""
    deduplicate: bool = True
    """Remove copies of the same problem within a set (DAPO-Math holds each some hundred times, the AIME files 32)."""
    overlap: Literal["error", "drop"] = "error"
    """A training problem that is also in an evaluation set: an error, or dropped from training. Prompts are compared,
    and of sets that no program generates the questions too: word for word, whatever their instructions, case, spacing,
    punctuation and LaTeX markup."""

    max_prompt_length: int = Field(1024, ge=1)
    """Tokens. Training problems with a longer prompt are left out; an evaluation problem with one is an error."""
