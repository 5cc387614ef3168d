"""Keys that a certificate does not cover."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from rpg.certificate.certificate import certificate_record, certify_experiment
from rpg.certificate.coverage import COVERED, WITHOUT_EFFECT, not_covered
from rpg.certificate.reading import in_words
from specs.schema.experiment import Experiment
from specs.schema.fields import is_model, members
from specs.schema.training import Training

SPEC: dict[str, Any] = {
    "name": "one",
    "model": {"source": "scratch"},
    "data": {"train": [{"source": "reasoning_gym", "task": "chain_sum", "size": 10}]},
    "reward": {"type": "exact_match"},
    "objective": {"type": "rpg"},
    "training": {"steps": 1, "prompts_per_step": 1, "group_size": 2},
}


def experiment(**changes: Any) -> Experiment:
    """The plain experiment with these keys, written as paths with two underscores."""
    spec = {name: dict(value) if isinstance(value, dict) else value for name, value in SPEC.items()}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        spec[section] = {**spec.get(section, {}), key: value}
    return Experiment.model_validate(spec)


def keys_of(model: type[BaseModel], place: str = "") -> Iterator[str]:
    """The paths of all keys of the schema that enter an identity."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            continue
        sections = list(sections_in(field.annotation))
        if not sections:
            yield f"{place}{name}"
        for section in sections:
            yield from keys_of(section, f"{place}{name}.")


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    for part in members(annotation):
        if is_model(part):
            yield part
        elif get_origin(part) is tuple:
            for item in get_args(part):
                yield from sections_in(item)


def is_named(key: str) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in COVERED | WITHOUT_EFFECT.keys() for end in range(1, len(parts) + 1))


def test_each_key_of_the_schema_is_covered_or_listed_with_the_values_that_have_no_effect() -> None:
    """A key that fails here changes the gradient, does not, or is covered: `rpg/certificate/coverage.py` says which."""
    assert [key for key in keys_of(Experiment) if not is_named(key)] == []


def test_no_table_names_a_key_that_the_schema_lacks() -> None:
    keys = set(keys_of(Experiment))
    named = COVERED | WITHOUT_EFFECT.keys()
    assert {name for name in named if not any(f"{key}.".startswith(f"{name}.") for key in keys)} == set()
    assert not COVERED & WITHOUT_EFFECT.keys()


def test_a_key_that_no_table_names_is_listed() -> None:
    class NoisyTraining(Training):
        gradient_noise: float = 0.0

    plain = experiment()
    noisy = NoisyTraining(steps=1, prompts_per_step=1, group_size=2, gradient_noise=0.1)
    assert not_covered(plain.model_copy(update={"training": noisy})) == {"training.gradient_noise": 0.1}
    assert not any(is_named(key) for key in keys_of(NoisyTraining, "training.") if "noise" in key)


def test_an_experiment_without_such_keys_has_none_listed() -> None:
    assert not_covered(experiment()) == {}


@pytest.mark.parametrize(
    ("key", "value", "listed"),
    [
        ("training__entropy_coef", 0.01, {"training.entropy_coef": 0.01}),
        ("training__mask_truncated", True, {"training.mask_truncated": True}),
        (
            "training__optimizer",
            {"type": "schedule_free_adamw"},
            {"training.optimizer.type": "schedule_free_adamw"},
        ),
        ("training__router_aux_loss_coef", 0.1, {"training.router_aux_loss_coef": 0.1}),
        ("rollout__max_staleness", 2, {"rollout.max_staleness": 2}),
        ("rollout__top_p", 0.9, {"rollout.top_p": 0.9}),
        ("rollout__correction", {"type": "mask"}, {"rollout.correction.type": "mask"}),
        ("rollout__dynamic_sampling", {"max_batches": 3}, {"rollout.dynamic_sampling": {"max_batches": 3}}),
        ("advantage__scale", "group_std", {"advantage.scale": "group_std"}),
        ("advantage__rewards", "normalized_each", {"advantage.rewards": "normalized_each"}),
        ("objective__aggregation", "sequence_mean", {"objective.aggregation": "sequence_mean"}),
        ("training__minibatches", 2, {}),
        ("training__entropy_coef", 0.0, {}),
    ],
)
def test_a_key_that_changes_the_gradient_is_listed_with_its_value(
    key: str, value: object, listed: dict[str, Any]
) -> None:
    assert not_covered(experiment(**{key: value})) == listed


def test_the_record_of_a_run_and_its_sentence_name_the_keys() -> None:
    record = certificate_record(certify_experiment(experiment(training__entropy_coef=0.01, rollout__top_p=0.9)))
    assert record["not_covered"] == {"rollout.top_p": 0.9, "training.entropy_coef": 0.01}
    said = in_words(record, updates=1)["meaning"]
    assert "does not cover what these keys of the spec do to the gradient" in said
    assert "rollout.top_p 0.9, training.entropy_coef 0.01." in said


def test_each_step_of_an_objective_that_schedules_change_names_the_keys() -> None:
    scheduled = experiment(objective__kl_coef={"schedule": [[1, 0], [4, 0.1]]}, training__mask_truncated=True)
    steps = certificate_record(certify_experiment(scheduled))["steps"]
    assert {step: each["not_covered"] for step, each in steps.items()} == {
        "1": {"training.mask_truncated": True},
        "4": {"training.mask_truncated": True},
    }
