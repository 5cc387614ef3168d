"""Sources of problems, the form of prompts, and filters."""

from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from specs.errors import Issue
from specs.schema.base import OpenSection, Spec, addition, unless_said
from specs.schema.reward import Reward


class Source(OpenSection):
    """A source of problems."""

    tag: ClassVar[str] = "source"
    group: ClassVar[str] = "rpg.data"
    package: ClassVar[str] = "rpg.data.sources"
    generated: ClassVar[bool] = False
    """Whether a program generates its problems. Many are then alike, and only their prompts distinguish them."""

    answered: ClassVar[bool] = True
    """Whether the policy answers its problems, and a reward scores the answers. Other sets are for evaluation only; the
    likelihood of their texts is their score."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Metrics of a set that is not answered; empty where its file or its package decides them."""

    source: str
    """Name of the kind of source."""
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Name of the set in evaluations and tables, required for an evaluation set. Empty means the task's, file's or
    dataset's own name."""
    limit: int = Field(0, ge=0)
    """Number of problems to keep, from the first on, after deduplication. 0 keeps all."""
    reward: Reward | None = None
    """How responses to the set's problems are scored. If left out, the experiment's `reward` applies."""

    def identity(self) -> dict[str, Any]:
        """Returns what `Spec.identity` returns, without the reward: it does not change the problems."""
        plain = super().identity()
        del plain["reward"]
        return plain

    @abstractmethod
    def read(self) -> Iterator[Any]:
        """Yields the set's problems as `rpg.data.SourceProblem`s, always in the same order.

        Raises:
            SpecError: a setting of the source is wrong; the paths of its issues are relative to the source.
        """

    def peek(self, count: int) -> Iterator[Any]:
        """Yields the first problems, for a check before anything runs; yields none if even reading these is slow.

        Raises:
            SpecError: as `read`.
        """
        return islice(self.read(), count)

    def is_here(self) -> bool:
        """Returns whether its problems can be read without a download; uses no network."""
        return True

    def shared_with(self, other: "Source") -> Issue | None:  # noqa: ARG002 (for those that override it)
        """Returns an issue, at a path of this set, if the settings imply that the two sets share problems."""
        return None


class TemplatePrompt(Spec):
    """A prompt made from a text with fields to fill in."""

    type: Literal["template"] = "template"
    template: str = "{prompt}"
    """Text with the fields {prompt} (the problem's text) and {metadata.NAME} (the item's metadata from
    reasoning-gym)."""


class ChatPrompt(Spec):
    """A prompt rendered with a chat template."""

    type: Literal["chat"] = "chat"
    system: str = ""
    """System message before the problem's own messages. Empty means no system message."""
    template: str = addition("{prompt}")
    """User message for problems that are plain text, with the fields of a template prompt. Problems given as messages
    already have one."""
    chat_template: str = addition("", max_length=1 << 16)
    """Chat template in place of the tokenizer's own: a file, relative to the spec file, or the Jinja text itself. It is
    saved with the trained model. Empty means the tokenizer's own."""
    enable_thinking: bool | Literal["unset"] = False
    """Argument for templates that know it; with false, Qwen3's puts an empty thought before the response. unset: not
    passed, so that the template's own default applies."""


Prompt = Annotated[TemplatePrompt | ChatPrompt, Field(discriminator="type"), unless_said("type", "template")]


class ShuffledOrder(Spec):
    """Repeated passes over the problems, each in its own random order."""

    type: Literal["shuffled"] = "shuffled"


class DifficultyOrder(Spec):
    """An order by how often the policy has solved each problem so far, in three pools: hard, medium and easy. Medium
    problems are preferred, since their groups are likely to have right and wrong responses; the others are drawn
    occasionally."""

    type: Literal["difficulty"] = "difficulty"
    hard_below: float = Field(0.1, ge=0, le=1)
    """Success rate below which a problem is hard."""
    easy_above: float = Field(0.9, ge=0, le=1)
    """Success rate above which a problem is easy."""
    explore: float = Field(0.5, gt=0, le=1)
    """Share of the prompts drawn outside the medium pool: first problems not yet tried, in the shuffled order, then
    hard and easy ones, beginning with those tried longest ago. If the medium pool has too few problems, the others fill
    its places."""
    memory: float = Field(0.5, ge=0, lt=1)
    """Share of its earlier success rate that a problem keeps when another group of responses is scored."""

    @model_validator(mode="after")
    def _in_order(self) -> "DifficultyOrder":
        if self.hard_below >= self.easy_above:
            raise ValueError("hard_below must be less than easy_above: between the two is the medium pool")
        return self


Order = Annotated[ShuffledOrder | DifficultyOrder, Field(discriminator="type")]


class Data(Spec):
    """Training and evaluation problems."""

    train: tuple[Source, ...] = Field(min_length=1)
    """Sets to train on, concatenated."""
    evaluation: tuple[Source, ...] = ()
    """Named sets to evaluate on; they may not share a problem with the training sets."""
    order: Order = addition(ShuffledOrder())
    """Order of the training problems: shuffled, or by difficulty."""
    prompt: Prompt = TemplatePrompt()
    """How a problem becomes the model's prompt."""
    deduplicate: bool = True
    """Remove copies of the same problem within a set (DAPO-Math holds each about a hundred times, the AIME files 32
    times)."""
    overlap: Literal["error", "drop"] = "error"
    """A training problem that is also in an evaluation set is an error, or is dropped from training. Prompts are
    compared. For sets that no program generates, questions are compared too: word for word, ignoring instructions,
    case, spacing, punctuation and LaTeX markup."""

    max_prompt_length: int = Field(1024, ge=1)
    """Largest number of tokens of a prompt. Training problems with a longer prompt are left out; an evaluation problem
    with a longer prompt is an error."""
