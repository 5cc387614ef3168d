"""Earlier looks at an experiment's answer: each takes a share of the error that all of them may make."""

from collections.abc import Sequence
from contextlib import suppress

from pipelines.home.home import Home
from pipelines.home.versions import is_experiment, looks_of, note_look
from pipelines.report import evidence
from pipelines.report.evidence import Group


def note_looks(home: Home, names: Sequence[str]) -> None:
    """Notes that a person was shown the answers of experiments, as far as this home can be written.

    Asked again at the same seeds, an answer is the same, and no further look.

    Args:
        names: experiments, as NAME or NAME@VERSION; others have no looks of this kind and are passed over.
    """
    for name in names:
        if is_experiment(home, name):
            with suppress(OSError):
                note_look(home, name, _num_seeds(evidence.experiment_groups(home, name)))


def earlier_looks(home: Home, name: str) -> list[float]:
    """Numbers of seeds at which an experiment's answer was given, fewer than it has now."""
    looks = looks_of(home, name)
    return [look for look in looks if look < _num_seeds(evidence.experiment_groups(home, name))] if looks else []


def _num_seeds(groups: Sequence[Group]) -> float:
    """Returns the runs that have finished or failed, in the mean over the cells with two or more; 0 if there is none.

    A mean grows with each seed of any cell, so that further seeds of one cell are a further look.
    """
    ended = [sum(run.trains and (run.has_ended or run.status == "failed") for run in group.runs) for group in groups]
    counts = [count for count in ended if count > 1]
    return round(sum(counts) / len(counts), 2) if counts else 0
