"""Scores tasks of lm-eval with its own code, given logprobs from the learner's passes.

The tokens of a request are those of lm-eval's own model for transformers (HFLM): spaces at the end of a context belong
to its continuation, and a longer sequence than the model's context loses its first tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rpg.data.sources.lm_eval import loaded_task
from rpg.data.unanswered import Item
from rpg.evaluation.drift import LogprobsOf
from rpg.evaluation.likelihood import ScoredItem, ScoredSet, first_token
from rpg.evaluation.measures import EvaluationMeasure, ratio_values
from rpg.evaluation.sequences import TokenSequence
from rpg.statistics.intervals import mean_interval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 2048
"""Tokens of a window if the model has no limit, as in lm-eval."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A task of lm-eval as an evaluation set."""

    item: Item
    tokenizer: "PreTrainedTokenizerBase"
    context: int
    """Length of the model's context in tokens; 0 if it has no limit."""
    confidence: float
    """Level of the intervals."""

    def scored(self, logprobs: LogprobsOf) -> list[ScoredSet]:
        """Returns the task's metrics under a policy. All ranks call it."""
        from lm_eval import evaluator

        task, model = self.item.settings["task"], self._model(logprobs)
        limit = self.item.settings["limit"] or None
        loaded = loaded_task(task, self.item.settings["path"])
        found: Any = evaluator.evaluate(model, loaded, limit=limit, bootstrap_iters=0, verbosity="ERROR")
        samples, sets = found["samples"][task], []
        for name in samples[0]["metrics"]:
            for filtered in dict.fromkeys(sample["filter"] for sample in samples):
                chosen = [sample for sample in samples if sample["filter"] == filtered]
                value = found["results"][task].get(f"{name},{filtered}")
                if value is not None:
                    metric = name if filtered == "none" else f"{name},{filtered}"
                    sets.append(self._of_metric(metric, name, chosen, float(value)))
        return sets

    def _model(self, logprobs: LogprobsOf) -> Any:
        """Returns a model of lm-eval with these logprobs."""
        from lm_eval.api.model import LM

        task_set = self

        class Learner(LM):  # type: ignore[misc]  # lm-eval has no types
            """The learner's policy as a model of lm-eval."""

            def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
                """Returns the logprob of each continuation. Does not compute whether greedy decoding would give it."""
                found = logprobs([task_set.continuation(*request.args) for request in requests])
                return [(float(values.sum()), False) for values in found]

            def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
                """Returns the logprob of each text."""
                windows = [task_set.windows(request.args[0]) for request in requests]
                found = iter(logprobs([window for each in windows for window in each]))
                return [sum(float(next(found).sum()) for _ in each) for each in windows]

            def generate_until(self, requests: list[Any]) -> list[str]:
                """Raises ValueError, because the data stage refuses tasks that generate."""
                raise ValueError(f"{len(requests)} requests to generate")

        return Learner()

    def continuation(self, context: str, continuation: str) -> TokenSequence:
        """Returns a sequence of context and continuation. The continuation's tokens are scored."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before = self._encoded(stripped) if stripped else [first_token(self.tokenizer)]
        whole = self._encoded(stripped + continuation) if stripped else [*before, *self._encoded(continuation)]
        ids = whole[-((self.context or _LONGEST) + 1) :]
        num_scored = min(len(whole) - len(before), len(ids) - 1)
        return TokenSequence(tuple(ids), ((len(ids) - num_scored, len(ids)),))

    def windows(self, text: str) -> list[TokenSequence]:
        """Returns the windows of a text, in which each token is scored once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        parts = get_rolling_token_windows(
            token_list=self._encoded(text),
            prefix_token=first_token(self.tokenizer),
            max_seq_len=self.context or _LONGEST,
            context_len=1,
        )
        return [
            TokenSequence((*context, *scored), ((len(context), len(context) + len(scored)),))
            for context, scored in map(make_disjoint_window, parts)
        ]

    def _of_metric(self, metric: str, name: str, samples: Sequence[Mapping[str, Any]], value: float) -> ScoredSet:
        """Returns a metric of a task with its interval. The interval is unknown unless the metric is a mean or a ratio
        of sums.

        Args:
            value: as lm-eval computes it.
        """
        ids = [f"{sample['doc_id']:06}-{sample['doc_hash'][:16]}" for sample in samples]
        texts = [str(sample["arguments"][0][0]) for sample in samples]
        values = [sample[name] for sample in samples]
        if name in ("bits_per_byte", "byte_perplexity", "word_perplexity"):
            nats, sizes = (np.array(column, dtype=np.float64) for column in zip(*values, strict=True))
            ratio = mean_interval(ratio_values(-nats, sizes), confidence=self.confidence, shares=False)
            bits = -nats / sizes / math.log(2)
            scale = (lambda end: end / math.log(2)) if name == "bits_per_byte" else np.exp
            items = [
                ScoredItem(*row) for row in zip(ids, bits.tolist(), texts, sizes.astype(int).tolist(), strict=True)
            ]
            measure = EvaluationMeasure(metric, value, float(scale(ratio.low)), float(scale(ratio.high)))
            return ScoredSet(
                self.item.dataset, metric, tuple(items if name == "bits_per_byte" else ()), measure, len(samples)
            )
        numbers = np.array(
            [float(each) if isinstance(each, bool | int | float | np.number) else math.nan for each in values]
        )
        known = bool(np.isfinite(numbers).all()) and math.isclose(float(numbers.mean()), value, abs_tol=1e-9)
        interval = mean_interval(numbers, confidence=self.confidence) if known else None
        ends = (interval.low, interval.high) if interval else (math.nan, math.nan)
        items = [ScoredItem(*row) for row in zip(ids, numbers.tolist(), texts, strict=True)] if known else []
        return ScoredSet(self.item.dataset, metric, tuple(items), EvaluationMeasure(metric, value, *ends), len(samples))

    def _encoded(self, text: str) -> list[int]:
        begin = self.tokenizer.bos_token
        special = {"add_special_tokens": False} if begin and text.startswith(str(begin)) else {}
        return list(self.tokenizer.encode(text, **special))
