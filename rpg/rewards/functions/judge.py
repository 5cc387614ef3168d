"""Scoring of a response by a language model: a judge behind an address, or one that runs on this machine."""

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rpg.rewards.judges import prompts
from rpg.rewards.judges.budget import Budget
from rpg.rewards.judges.endpoint import Endpoint, EndpointSettings, address_issues, key_of
from rpg.rewards.judges.model_process import ModelSettings, ScoringModel
from rpg.rewards.judges.prompts import Form
from rpg.rewards.judges.scorer import Asked, JudgeScorer, JudgeSettings
from rpg.rewards.judges.verdicts import KeptReplies
from rpg.rewards.score import Place, Score
from rpg.types import Problem
from specs.errors import Issue, IssueError, SpecError
from specs.machine.manifests import directory_digest
from specs.schema.base import PathKind, Spec, execution, names_path
from specs.schema.execution import SecretReference
from specs.schema.reward import Reward
from specs.schema.rollout import VllmRollout, not_installed

_AT_ONCE_TOKENS = 16
"""Largest number of tokens of a verdict without reasons."""
_VLLM_SHARE = 0.4
"""Share of a GPU's memory if the spec names none."""


class Scale(Spec):
    """The numbers that a judge may give."""

    low: float
    """Number of the worst answer, which is reward 0."""
    high: float
    """Number of the best answer, which is reward 1."""

    @model_validator(mode="after")
    def _check(self) -> "Scale":
        if self.high <= self.low:
            raise IssueError(Issue("must be above low", ("high",), f"{self.high:g}", f"above {self.low:g}"))
        return self


class Price(Spec):
    """Price of a judge, in any currency."""

    input: float = Field(ge=0)
    """Price of a million tokens of questions."""
    output: float = Field(ge=0)
    """Price of a million tokens of replies."""


class JudgeBudget(Spec):
    """Limits on the calls of a run's judge, over all attempts and stages."""

    calls: int = Field(0, ge=0)
    """Largest number of calls. 0 means no limit. Stored verdicts cost no call."""
    money: float = Field(0.0, ge=0)
    """Largest cost of the calls, in the currency of `price`. 0 means no limit. Calls that are in progress when it is
    reached may exceed it."""


class Judge(Reward):
    """The verdict of a judge, from 0 to 1: the mean of its votes. A graded reward."""

    waits: ClassVar[bool] = True
    graded: ClassVar[bool] = True
    worst: ClassVar[float | None] = 0.0

    model: str = names_path("path or id", min_length=1)
    """Directory of the judging model, which runs in its own process; with `endpoint`, the model's name there."""
    endpoint: str = execution("")
    """Address of an OpenAI-compatible API up to /v1, http or https. Empty if `model` is a directory."""
    key: SecretReference | None = execution(None)
    """env:NAME or file:/PATH of the endpoint's key. Leave it out if the endpoint needs no key."""
    rubric: str = Field(min_length=1)
    """Criteria, written for the judge."""
    scale: Scale
    """Range of its verdicts."""
    votes: int = Field(1, ge=1, le=64)
    """Replies to each question."""
    compare: Literal["each", "pairs", "group"] = "each"
    """Responses in a question. each: one. pairs: two of a group, in both orders; the reward is the share of comparisons
    won. group: all of a group, in both orders; the reward is 1 for the best, 0 for the last."""
    prompt: Literal[1] = 1
    """Version of the built-in template around rubric, problem and response."""
    template: str = ""
    """Your own template instead, with {problem}, {answer}, {gold}, {rubric} and {key}. For judges that were trained on
    one form; with `reasoning` the reply must end with the line `VERDICT-{key}: N`."""
    reasoning: bool = True
    """Whether the judge gives reasons before its verdict."""
    show_answer: bool = False
    """Whether the judge sees the problem's right answer."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of its sampling; several votes need one above 0."""
    max_tokens: int = Field(1024, ge=1)
    """Largest number of tokens of a reply; without `reasoning` at most 16."""
    concurrency: int = execution(16, ge=1, le=256)
    """Largest number of concurrent questions of a rank."""
    timeout_seconds: float = execution(120.0, gt=0)
    """Seconds after which an endpoint's call is aborted and retried."""
    patience_seconds: float = execution(1800.0, gt=0)
    """Seconds that an endpoint may be unreachable or refuse requests before the attempt ends, to be retried."""
    price: Price | None = execution(None)
    """Price of the endpoint's tokens, for the plan and the budget. If left out, the price is unknown."""
    budget: JudgeBudget = execution(JudgeBudget())
    """Limit on a run's questions. A run that reaches it ends; with a higher limit it can be resumed."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Engine for a model in a directory. auto: vLLM on a GPU if it is installed, else transformers."""
    memory_fraction: float = execution(0.0, ge=0, lt=1)
    """Share of the rank's GPU for a judge's vLLM. 0 means 0.4."""
    max_length: int = Field(0, ge=0)
    """Largest number of tokens of a question and its reply, for a model in a directory. 0 means the model's context, at
    most 16384."""
    labels: str = names_path("file", "")
    """File of JSON lines with labelled responses, with which `rpg judge calibrate` measures the judge. Empty if there
    is no such file."""

    def compares(self) -> bool:
        """See Reward."""
        return self.compare != "each"

    def identity(self) -> dict[str, Any]:
        """See Reward. The labels only measure the judge and do not change verdicts."""
        plain = super().identity()
        del plain["labels"]
        return plain

    def paths(self) -> Iterator[tuple[tuple[str | int, ...], PathKind, str]]:
        """See Spec."""
        if not self.endpoint:
            yield ("model",), "directory", self.model

    def calls(self, groups: int, size: int) -> int:
        """Returns the largest number of calls for this number of groups."""
        questions = {"each": size, "pairs": size * (size - 1), "group": 2 * (size > 1)}[self.compare]
        return groups * questions * self.votes

    @property
    def reply_tokens(self) -> int:
        """Returns the largest number of tokens of a reply."""
        return self.max_tokens if self.reasoning else min(self.max_tokens, _AT_ONCE_TOKENS)

    @property
    def vllm_share(self) -> float:
        """Returns the share of the GPU's memory that vLLM takes."""
        return self.memory_fraction or _VLLM_SHARE

    def engine_here(self, device: str) -> Literal["transformers", "vllm"]:
        """Returns the engine that runs on a device of this type."""
        if self.engine != "auto":
            return self.engine
        return "vllm" if device == "cuda" and find_spec("vllm") else "transformers"

    def lacks(self) -> Issue | None:
        """See Reward."""
        if self.endpoint:
            try:
                key_of(self.key or "", ("reward",))
            except SpecError as error:
                return error.issues[0]
        elif not os.path.isfile(os.path.join(self.model, "config.json")):
            hint = "a judge behind an address has an `endpoint`; a model of the Hub is fetched by `hf download`"
            return Issue("the directory contains no model", ("reward", "model"), self.model, hint=hint)
        elif self.engine == "vllm" and (issue := not_installed(VllmRollout())):
            return replace(issue, path=("reward", "engine"), allowed="auto, transformers")
        return None

    def open(self, place: Place) -> JudgeScorer:
        """See Reward."""
        at_once = not (self.reasoning or self.endpoint)
        name = self.model if self.endpoint else f"directory {directory_digest(Path(self.model))[:16]}"
        settings = JudgeSettings(
            name=name,
            form=Form(self.compare, self.rubric, self.scale.low, self.scale.high, self.reasoning, self.template),
            votes=self.votes,
            temperature=self.temperature,
            max_tokens=self.reply_tokens,
            shows_answer=self.show_answer,
            at_once=at_once,
            concurrency=self.concurrency,
        )
        budget = Budget(place.run, calls=self.budget.calls, money=self.budget.money, path=(*place.path, "budget"))
        return JudgeScorer(settings, self._asked(place, at_once=at_once), KeptReplies(place.verdicts), budget)

    def _asked(self, place: Place, *, at_once: bool) -> Asked:
        if not self.endpoint:
            return ScoringModel(
                ModelSettings(
                    kind="judge",
                    directory=Path(self.model),
                    device=place.device,
                    batch_size=self.concurrency,
                    max_length=self.max_length,
                    engine=self.engine_here(place.device),
                    memory_fraction=self.vllm_share,
                    prefix=prompts.PREFIX if at_once else "",
                )
            )
        price = self.price or Price(input=0, output=0)
        return Endpoint(
            EndpointSettings(
                url=self.endpoint,
                model=self.model,
                key=self.key or "",
                path=place.path,
                timeout_seconds=self.timeout_seconds,
                patience_seconds=self.patience_seconds,
                input_price=price.input,
                output_price=price.output,
            )
        )

    def score(self, problem: Problem, response: str) -> Score:
        """Returns one verdict outside a run. It is not kept and does not count in a budget."""
        with self.open(Place()) as scorer:
            return scorer.submit(problem, response).result()

    @model_validator(mode="after")
    def _check(self) -> "Judge":
        if issue := next(self._issues(), None):
            raise IssueError(issue)
        return self

    def _issues(self) -> Iterator[Issue]:
        if self.endpoint:
            yield from address_issues(self.endpoint)
        elif self.key:
            yield Issue("a model on this machine needs no key", ("key",), hint="leave it out, or name its `endpoint`")
        if self.votes > 1 and self.temperature == 0:
            hint = "write temperature: 0.7, or votes: 1"
            yield Issue("all votes would be the same reply", ("votes",), f"{self.votes} at temperature 0", hint=hint)
        if self.budget.money and not self.price:
            hint = "write `price: {input: ..., output: ...}`, per million tokens"
            yield Issue("money cannot be counted without a price", ("budget", "money"), hint=hint)
        if self.template and self.compare != "each":
            yield Issue("a template shows one answer", ("template",), given=f"compare: {self.compare}")
        if self.template and "{answer}" not in self.template:
            yield Issue("the template does not contain the answer", ("template",), allowed="a text with {answer} in it")
        if self.template and (self.reasoning or self.endpoint) and "{key}" not in self.template:
            hint = "ask for a last line `VERDICT-{key}: N`: an answer cannot know it"
            yield Issue("the template does not contain the verdict's line", ("template",), hint=hint)
