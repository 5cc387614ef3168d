"""Training with problems by difficulty: resumed, on two ranks, and sampled ahead."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.planning.fingerprint import train_identity
from specs import Experiment, SpecError, load_experiment
from tests.rpg.test_pause import assert_trained_alike, set_inputs
from tests.rpg.tiny_run import SPEC, make_run, rows, train

DATA = {"order": {"type": "difficulty", "explore": 0.5}}
TRAINING = {"steps": 8, "checkpoint": {"every_steps": 3}}


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.long)], ids=["in step", "ahead"])
def straight(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that does not pause, and its changes; the batches sampled in step or ahead."""
    changes: dict[str, Any] = {"data": DATA, "training": TRAINING, "rollout": {"max_staleness": request.param}}
    run_dir = make_run(inputs, tmp_path_factory.mktemp("runs") / "run", **changes)
    train(run_dir)
    return run_dir, changes


@pytest.mark.more
def test_training_that_pauses_draws_the_problems_that_it_would_have_drawn(
    inputs: Path, straight: Any, tmp_path: Path
) -> None:
    run_dir = make_run(inputs, tmp_path / "run", **straight[1])
    for step in (4, 0):
        set_inputs(run_dir, until=step)
        train(run_dir)
    assert_trained_alike(run_dir, straight[0])


@pytest.mark.more
def test_the_order_is_another_than_the_shuffled_one_once_groups_differ(
    inputs: Path, straight: Any, tmp_path: Path
) -> None:
    shuffled = make_run(inputs, tmp_path / "run", training=TRAINING, rollout=straight[1]["rollout"])
    train(shuffled)
    assert drawn(shuffled, 8) != drawn(straight[0], 8)


@pytest.mark.more
def test_two_ranks_draw_what_one_does(inputs: Path, straight: Any, tmp_path: Path) -> None:
    changes = straight[1] | {"training": {**TRAINING, "ranks": 2}}
    run_dir = make_run(inputs, tmp_path / "two", **changes)
    train(run_dir, ranks=2)
    # Sums of floats differ between numbers of ranks, and with them in time a sampled token: the first steps agree.
    assert drawn(run_dir, 3) == drawn(straight[0], 3)


def drawn(run_dir: Path, steps: int) -> list[tuple[int, int, str]]:
    """The prompt of each group of the first steps."""
    found = {(row["step"], row["group_id"], row["prompt"]) for row in rows(run_dir, "rollouts") if row["step"] <= steps}
    return sorted(found)


def test_an_order_that_is_left_out_or_shuffled_leaves_the_identity_as_it_was() -> None:
    plain = train_identity(Experiment.model_validate(SPEC))
    said = {**SPEC, "data": {**SPEC["data"], "order": {"type": "shuffled"}}}
    assert train_identity(Experiment.model_validate(said)) == plain
    other = train_identity(Experiment.model_validate({**SPEC, "data": {**SPEC["data"], **DATA}}))
    assert {name: other[name] for name in other.keys() - plain.keys()} == {
        **{"data.order.type": "difficulty", "data.order.explore": 0.5, "data.order.memory": 0.5},
        **{"data.order.hard_below": 0.1, "data.order.easy_above": 0.9},
    }


REFUSED = {
    "{type: difficult}": "data.order.type: unknown type",
    "{type: difficulty, explore: 0}": "data.order.explore: must be greater than 0",
    "{type: difficulty, hard_below: 0.9, easy_above: 0.1}": "data.order: hard_below must be less than easy_above",
    "{type: shuffled, explore: 0.5}": "data.order.explore: unknown field",
}


@pytest.mark.parametrize("order", REFUSED)
def test_an_order_that_cannot_be_is_refused_at_its_line(order: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(FILE.replace("ORDER", order))
    with pytest.raises(SpecError) as refused:
        load_experiment(spec)
    assert f"spec.yaml:5: {REFUSED[order]}" in str(refused.value)


FILE = """name: order
model: {source: scratch}
data:
  train: [{source: products, size: 10, seed: 1}]
  order: ORDER
reward: {type: exact_match}
objective: {type: rpg}
training: {steps: 2, prompts_per_step: 2, group_size: 2}
"""
