"""Scoring of a response by a sequence classifier."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rpg.rewards.judges.endpoint import RequestRefusedError
from rpg.rewards.judges.model_process import ModelSettings, ScoringModel
from rpg.rewards.judges.verdicts import KeptReplies, Reply
from rpg.rewards.score import Member, Place, Score, Scorer
from rpg.types import Problem
from specs.bounds import read_within
from specs.errors import Issue
from specs.machine.manifests import directory_digest
from specs.schema.base import execution, names_path
from specs.schema.reward import Reward


class RewardModel(Reward):
    """The value of a sequence classifier for problem and response: its output if it has a single one, else the
    probability of `label`. A graded reward."""

    waits: ClassVar[bool] = True
    graded: ClassVar[bool] = True

    path: str = names_path("directory", min_length=1)
    """Directory of the classifier: config, safetensors, tokenizer. Its chat template writes the conversation."""
    label: str = ""
    """Label whose probability is the reward, for a classifier with several labels."""
    batch_size: int = execution(16, ge=1, le=512)
    """Responses in a batch of the classifier."""
    max_length: int = Field(0, ge=0)
    """Largest number of tokens of problem and response; a longer response cannot be scored. 0 means the model's
    context, at most 16384."""

    def worst_value(self) -> float | None:
        """See Reward. Known if the value is a probability."""
        return 0.0 if self.label else None

    def lacks(self) -> Issue | None:
        """See Reward."""
        config = self._config()
        where = ("reward", "path")
        if not config:
            return Issue("the directory contains no model", where, self.path, allowed="a directory with a config.json")
        kinds = [name for name in config.get("architectures") or () if isinstance(name, str)]
        if not any(name.endswith("ForSequenceClassification") for name in kinds):
            given = f"{self.path}: {', '.join(kinds) or 'no architecture'}"
            allowed = "a model with a classification head: ...ForSequenceClassification"
            hint = "a model that writes is a judge: reward.type: judge"
            return Issue("the model has no classification head", where, given, allowed, hint)
        labels = self._labels()
        if len(labels) > 1 and self.label not in labels:
            message = "the classifier has several labels" if not self.label else "the classifier has no such label"
            return Issue(message, ("reward", "label"), self.label, ", ".join(labels))
        if len(labels) == 1 and self.label:
            hint = "leave it out: its value is the reward"
            return Issue("the classifier has a single output", ("reward", "label"), self.label, hint=hint)
        return None

    def open(self, place: Place) -> "ClassifierScorer":
        """See Reward."""
        labels = self._labels()
        model = ScoringModel(
            ModelSettings(
                kind="classifier",
                directory=Path(self.path),
                device=place.device,
                batch_size=self.batch_size,
                max_length=self.max_length,
                label=labels.index(self.label) if self.label else 0,
            )
        )
        name = f"{directory_digest(Path(self.path))} {self.label} {self.max_length}"
        return ClassifierScorer(name, model, KeptReplies(place.verdicts), threads=2 * self.batch_size)

    def score(self, problem: Problem, response: str) -> Score:
        """Returns one value outside a run. It is not kept."""
        with self.open(Place()) as scorer:
            return scorer.submit(problem, response).result()

    def _config(self) -> dict[str, Any]:
        try:
            config = json.loads(read_within(os.path.join(self.path, "config.json")))
        except (OSError, ValueError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    def _labels(self) -> list[str]:
        """Returns the names of the outputs, in order. transformers assumes two if the config does not name them."""
        named = self._config().get("id2label")
        if not isinstance(named, dict):
            return ["LABEL_0", "LABEL_1"]
        return [str(named[key]) for key in sorted(named, key=lambda key: int(key) if str(key).isdecimal() else 0)]


class ClassifierScorer(Scorer):
    """A Scorer that gets its values from a classifier, in batches."""

    def __init__(self, name: str, model: ScoringModel, kept: KeptReplies, *, threads: int) -> None:
        self._name, self._model, self._kept = name, model, kept
        self._threads = ThreadPoolExecutor(threads, "classifying")

    def submit(self, problem: Problem, response: str, member: Member | None = None) -> "Future[Score]":  # noqa: ARG002
        """See Scorer. Its result raises ScoringModelError if the model's process ends."""
        return self._threads.submit(self._value, [*problem.conversation(), {"role": "assistant", "content": response}])

    def close(self) -> None:
        """See Scorer."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._model.close()
        self._threads.shutdown()

    def _value(self, messages: Sequence[dict[str, Any]]) -> Score:
        asked = {"classifier": self._name, "messages": list(messages)}
        kept = self._kept.read(asked)
        try:
            value = float(kept.text) if kept else self._model.classify(messages)
        except RequestRefusedError as error:
            return Score.failed(str(error))
        if kept is None:
            self._kept.write(asked, Reply(str(value)))
        return Score(value, None)
