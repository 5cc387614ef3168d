"""Left-out keys of a spec take the published setting of its objective."""

import pytest
from spec_text import changed, write

from specs import load_experiment
from specs.schema.fields import literal_of, members
from specs.schema.objective import Objective, PublishedObjective

OBJECTIVE = "  type: rpg\n  kl_coef: 1e-2\n  clip:\n    type: dual\n    low: 0.2\n"


def load(objective: str, rest: str = ""):
    return load_experiment(write(changed(OBJECTIVE, f"  {objective}\n") + rest))


def test_left_out_sections_are_the_published_ones():
    assert load("type: grpo").advantage.scale == "group_std"
    assert load("type: dr_grpo").advantage.scale == "none"


def test_what_is_said_wins_field_by_field():
    advantage = load("type: grpo", "advantage: {baseline: batch_mean}\n").advantage
    assert (advantage.baseline, advantage.scale) == ("batch_mean", "group_std")


def test_another_source_of_the_reference_takes_nothing_from_the_published_one():
    reference = load("type: grpo", "reference: {source: snapshot, update: {every_steps: 2}}\n").reference
    assert (reference.source, reference.update.every_steps) == ("snapshot", 2)
    assert load("type: grpo", "reference: {source: behaviour}\n").reference.update is None


RIVALS = [
    kind
    for rival in members(Objective)
    if issubclass(rival, PublishedObjective)
    for kind in literal_of(rival.model_fields["type"])
]


@pytest.mark.parametrize("kind", RIVALS)
def test_every_rival_loads_by_its_name_alone(kind):
    from specs.schema.experiment import published_setting

    experiment = load(f"type: {kind}")
    assert experiment.objective.type == kind
    for section, setting in published_setting({"type": kind}).items():
        for field, value in setting.items():
            found = getattr(getattr(experiment, section), field)
            assert found == value or found.model_dump(include=value.keys()) == value
