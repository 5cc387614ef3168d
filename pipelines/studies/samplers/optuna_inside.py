"""All uses of Optuna's internals. Each has a test that fails if a version of Optuna changes it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


def first_generation() -> dict[str, Any]:
    """Returns the note with which a genetic sampler accepts, among its first parents, a result that it did not
    propose."""
    from optuna.samplers import NSGAIISampler

    return {NSGAIISampler._get_generation_key(): 0}


def one_sequence(place: int, *, seed: int, independent: "BaseSampler") -> "BaseSampler":
    """Returns a sampler of one low-discrepancy sequence. The sequence stays the same if ranges move after its start.

    Args:
        place: index of the sequence's point that it proposes, from 0.
        seed: scrambles the sequence.
        independent: samples the parameters that the sequence does not cover.
    """
    from optuna.samplers import QMCSampler

    class OneSequence(QMCSampler):
        def _find_sample_id(self, *_: object) -> int:
            return place

    return OneSequence(
        scramble=True,
        seed=seed,
        independent_sampler=independent,
        warn_asynchronous_seeding=False,
        warn_independent_sampling=False,
    )


def suggest(trial: "Trial", name: str, distribution: "BaseDistribution") -> Any:
    """Returns the value that the trial's sampler proposes, for any distribution."""
    return trial._suggest(name, distribution)


def notes_of(study: "Study", trial: "Trial") -> dict[str, Any]:
    """Returns the sampler's notes of a trial that was requested."""
    return study._storage.get_trial(trial._trial_id).system_attrs


def trial_id(trial: "FrozenTrial") -> int:
    """Returns the trial's id in the storage."""
    return trial._trial_id
