"""The answer of an experiment's runs: what was measured, the verdict on it, and the sentences of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelines.home.home import Home
    from pipelines.report.answer import Answer
    from pipelines.report.evidence import Group
    from pipelines.report.statistics import Verdict


@dataclass(frozen=True)
class Answered:
    """An experiment's answer."""

    text: str
    found: Sequence[Answer]
    """For each evaluation set and measure."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that the text rests on; None for one group of seeds."""
        return next((answer.verdict for answer in self.found if answer.verdict), None)


def answered(home: Home, name: str, groups: Sequence[Group]) -> Answered:
    """Returns the answer that groups of an experiment's runs give.

    Args:
        name: the experiment, perhaps with a version: NAME@VERSION.
    """
    from pipelines.report.answer import answers_of
    from pipelines.report.answer.whole import whole_answer
    from pipelines.report.diagnosis import not_scored
    from pipelines.report.evidence import metric_curves
    from storage import Store

    with Store.open(home.root) as store:
        found = answers_of(home, store, groups, [name])
        curves = metric_curves(store, [run.run_id for group in groups for run in group.runs])
        failed = not_scored(store, groups)
    return Answered(whole_answer(home, name, groups, found, curves, failed), found)
