"""Where code chooses by a value of the schema, a value that it does not know is an error and never another one's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipelines.home.home import Home
from pipelines.sinks.tracker import open_session
from pipelines.studies.proposals import propose
from pipelines.studies.rungs import verdict
from rpg.advantages import advantages
from rpg.control.learning_rate import learning_rate
from rpg.learner.deepspeed import optimizer_maker
from rpg.objectives.aggregate import aggregate
from rpg.objectives.correction import correction_weight
from rpg.objectives.regularized import _clipped_loss, _clipped_weight
from rpg.reference import reference_policy
from specs.rules.study import _idle_sampler
from specs.schema.objective import RegularizedObjective
from specs.schema.reference import Reference
from specs.schema.rollout import Correction
from specs.schema.schedule import ValueSchedule
from specs.schema.study import FloatRange, SearchSampler
from specs.schema.training import Optimizer, Schedule, Training

NEW: Any = "only in the schema"
ONE = torch.ones(1)
OBJECTIVE = RegularizedObjective.model_construct(clip=SimpleNamespace(type=NEW, low=0.2, high=0.2), kl_coef=0.0)
STUDY: Any = SimpleNamespace(
    sampler=SearchSampler.model_construct(type=NEW, seed=0, startup_trials=1),
    parameters={"training.optimizer.learning_rate": FloatRange(float=(0.1, 0.2))},
    targets=[SimpleNamespace(direction="maximize")],
    pruner=SimpleNamespace(type=NEW),
)
TRAINING = Training.model_construct(optimizer=Optimizer.model_construct(type=NEW))
SUM = {"num_tokens": 1, "num_sequences": 1, "max_response_length": 1}


def no_teacher() -> Any:
    raise AssertionError("nothing asks for a teacher")


CHOICES: dict[str, Callable[[], object]] = {
    "search sampler": lambda: propose(STUDY, (), ()),
    "rules of a search sampler": lambda: list(_idle_sampler(STUDY)),
    "pruner": lambda: verdict(STUDY, cast(Any, SimpleNamespace(rung=1)), ()),
    "sink": lambda: open_session(cast(Any, SimpleNamespace(type=NEW)), cast(Any, None), cast(Home, None)),
    "learning-rate schedule": lambda: learning_rate(
        Schedule.model_construct(type=NEW, warmup_updates=0), peak=1.0, update=0, num_updates=1
    ),
    "value schedule": lambda: ValueSchedule.model_construct(schedule=((1, 0.0), (3, 1.0)), between=NEW).at(2),
    "optimizer": lambda: optimizer_maker(TRAINING),
    "aggregation": lambda: aggregate(ONE[None], ONE[None], aggregation=NEW, **SUM),
    "correction": lambda: correction_weight(Correction.model_construct(type=NEW), ONE, ONE, ONE),
    "baseline": lambda: advantages(ONE, ONE, baseline=NEW, scale="none"),
    "scale": lambda: advantages(ONE, ONE, baseline="none", scale=NEW),
    "clip of the weight": lambda: _clipped_weight(OBJECTIVE, cast(Any, None)),
    "clip of the loss": lambda: _clipped_loss(OBJECTIVE, cast(Any, None)),
    "reference": lambda: reference_policy(Reference.model_construct(source=NEW), torch.nn.Linear(1, 1), no_teacher),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_value_that_the_schema_alone_knows_becomes_no_other(choose: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match=r"Expected code to be unreachable"):
        choose()
