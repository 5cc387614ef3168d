"""Outcomes as rows of plain values, for data frames."""

from collections.abc import Iterable
from typing import Any

from pipelines.report.answer.outcome import Outcome
from pipelines.report.statistics import Interval


def outcome_rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Returns a row for each outcome; missing values are None."""
    return [
        {
            "label": outcome.label,
            "dataset": outcome.dataset,
            "measure": outcome.measure,
            **_interval("before", outcome.before),
            **_interval("after", outcome.after),
            **_interval("gain", outcome.gain),
            **_interval("against_first", outcome.against_first),
            "differs": outcome.differs,
            "seeds": outcome.num_seeds,
            "failed": outcome.num_failed,
            "problems": outcome.num_problems,
            "step": outcome.step,
        }
        for outcome in outcomes
    ]


def _interval(name: str, interval: Interval | None) -> dict[str, float | None]:
    known = interval is not None and interval.known
    return {
        name: interval.value if interval else None,
        f"{name}_low": interval.low if interval and known else None,
        f"{name}_high": interval.high if interval and known else None,
    }
