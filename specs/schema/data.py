"""Where problems come from, how they become prompts, and what is filtered out."""

from typing import Annotated, Literal

from pydantic import Field

from specs.schema.base import Spec, addition, unless_said
from specs.schema.model import ConfigValue


class Columns(Spec):
    """Which column holds what; dots reach into structs. The defaults are the DAPO and verl schema."""

    prompt: str = "prompt"
    """A list of chat messages ({role, content}) or plain text."""
    answer: str = "reward_model.ground_truth"
    """The gold answer."""
    data_source: str = ""
    """Column that names the problem's origin; empty: the set's own name."""


class _Source(Spec):
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """What the set is called in evaluations and tables; an evaluation set needs one.
    Empty: the task's, the file's or the dataset's own name."""
    limit: int = Field(0, ge=0)
    """Keep the first so many problems after deduplication; 0 keeps all."""


class ReasoningGymSource(_Source):
    """Problems that reasoning-gym generates, with its own scorer."""

    source: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """A task of reasoning-gym, e.g. chain_sum."""
    config: dict[str, ConfigValue] = Field(default_factory=dict)
    """That task's settings, e.g. {min_terms: 2, max_terms: 2}."""
    size: int = Field(ge=1)
    """Problems to generate, before deduplication."""
    seed: int = Field(0, ge=0)
    """Seed of the generator. Item i of seed s is item i+1 of seed s-1: keep the seeds of two sets further apart than
    their sizes."""


class ParquetSource(_Source):
    """A Parquet file."""

    source: Literal["parquet"] = "parquet"
    path: str = Field(min_length=1)
    """File, relative to the spec file."""
    columns: Columns = Columns()
    """Which column holds what."""


class JsonlSource(_Source):
    """A file with one JSON object a line."""

    source: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)
    """File, relative to the spec file."""
    columns: Columns = Columns()
    """Which column holds what."""


class HubSource(_Source):
    """A dataset that the `datasets` library can load: a Hub id or a local directory."""

    source: Literal["hub"] = "hub"
    path: str = Field(min_length=1)
    """Hub id or directory."""
    split: str = "train"
    """Part of the dataset."""
    revision: str = "main"
    """Branch, tag or commit on the Hub."""
    columns: Columns = Columns()
    """Which column holds what."""


Source = Annotated[ReasoningGymSource | ParquetSource | JsonlSource | HubSource, Field(discriminator="source")]


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
    enable_thinking: bool = False
    """Passed to templates that know it (Qwen3's hybrid models)."""


Prompt = Annotated[TemplatePrompt | ChatPrompt, Field(discriminator="type"), unless_said("type", "template")]


class Data(Spec):
    """Training and evaluation problems."""

    train: tuple[Source, ...] = Field(min_length=1)
    """Sets to train on, put one after another."""
    evaluation: tuple[Source, ...] = ()
    """Named sets to evaluate on; none may share a problem with the training sets."""
    prompt: Prompt = TemplatePrompt()
    """How a problem becomes the text that the model sees."""
    deduplicate: bool = True
    """Remove copies of the same problem within a set (DAPO-Math holds each some hundred times, the AIME files 32)."""
    overlap: Literal["error", "drop"] = "error"
    """A training problem that is also in an evaluation set: an error, or dropped from training."""
    max_prompt_length: int = Field(1024, ge=1)
    """Tokens. Training problems with a longer prompt are left out; an evaluation problem with one is an error."""
