"""The whole answer: the headline, with a remark if there was no learning signal or if runs are missing."""

from collections.abc import Sequence

from pipelines.home.home import Home
from pipelines.home.runs import status_of
from pipelines.home.versions import is_experiment, runs_of
from pipelines.planning.calibration import trust_in
from pipelines.report.answer import Answer, answers_of, headline
from pipelines.report.diagnosis import not_scored, nothing_to_learn, without_signal
from pipelines.report.evidence import Curves, Group, metric_curves
from specs.reading.recorded import unreadable
from storage import Store


def answered(home: Home, store: Store, name: str, groups: Sequence[Group]) -> tuple[str, list[Answer]]:
    """Returns the whole answer on an experiment's groups, and the evidence for each evaluation set.

    Args:
        name: the experiment, optionally with a version: NAME@VERSION.
    """
    found = answers_of(home, store, groups, [name])
    curves = metric_curves(store, [run.run_id for group in groups for run in group.runs])
    return whole_answer(home, name, groups, found, curves, not_scored(store, groups)), found


def whole_answer(
    home: Home, name: str, groups: Sequence[Group], found: Sequence[Answer], curves: Curves, failed: str = ""
) -> str:
    """Returns the answer in a few sentences.

    Args:
        name: the requested experiment, whose missing runs are listed, or run.
        curves: curves of `zero_std_fraction` and `reward/mean`.
        failed: failures of the reward, see `diagnosis.not_scored`.
    """
    silent = without_signal(groups, curves)
    told = len(groups) == 1 or any(answer.claims for answer in found) or len(silent) < len(groups)
    trust = trust_in(home, (group.runs[0].spec for group in groups))
    headlined = headline(found) if told else ""
    sentences = [nothing_to_learn(groups, curves), headlined, trust, failed, incomplete(home, name)]
    return " ".join(sentence for sentence in sentences if sentence)


def incomplete(home: Home, name: str) -> str:
    """Returns `3 of 4 runs; incomplete.` if runs of an experiment have not finished, and names each run that is left
    out because its spec cannot be read. Empty if there are no such runs."""
    run_ids = runs_of(home, name) if is_experiment(home, name) else []
    finished = sum(status_of(home, run_id) == "finished" for run_id in run_ids)
    sentences = [f"{finished} of {len(run_ids)} runs; incomplete."] if finished < len(run_ids) else []
    for run_id in run_ids:
        directory = home.run(run_id)
        if (directory / "run.json").is_file() and (why := unreadable(directory)):
            sentences.append(f"{run_id} is left out, as its spec cannot be read: {'; '.join(why)}.")
    return " ".join(sentences)
