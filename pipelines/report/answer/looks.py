"""Earlier interim analyses of an experiment's answer. Each uses a share of the error probability that all of them
together may have."""

from collections.abc import Sequence
from contextlib import suppress

from pipelines.home.home import Home
from pipelines.home.versions import is_experiment, looks_of, note_look
from pipelines.report import evidence
from pipelines.report.evidence import Group


def note_looks(home: Home, names: Sequence[str]) -> None:
    """Records that a person has seen the answers of experiments, if this home is writable.

    A second request with the same seeds gives the same answer, and is no further interim analysis.

    Args:
        names: experiments, as NAME or NAME@VERSION; other names have no interim analyses of this kind and are skipped.
    """
    for name in names:
        if is_experiment(home, name):
            with suppress(OSError):
                note_look(home, name, seeds_ended(evidence.experiment_groups(home, name)))


def earlier_looks(home: Home, name: str) -> list[float]:
    """Returns the numbers of seeds, below the present number, at which an experiment's answer was shown."""
    looks = looks_of(home, name)
    return [look for look in looks if look < seeds_ended(evidence.experiment_groups(home, name))] if looks else []


def seeds_ended(groups: Sequence[Group]) -> float:
    """Returns the number of finished or failed runs, as the mean over the cells with two or more; 0 without such a
    cell.

    A mean grows with each seed of any cell, so that further seeds of one cell make a further interim analysis.
    """
    ended = [sum(run.trains and (run.has_ended or run.status == "failed") for run in group.runs) for group in groups]
    counts = [count for count in ended if count > 1]
    return round(sum(counts) / len(counts), 2) if counts else 0
