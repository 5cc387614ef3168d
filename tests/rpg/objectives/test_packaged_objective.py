"""An objective of an installed package: in a spec, certified, trained with and replayed."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from places import PACKAGES, ROOT

from benchmarks.objectives import inputs
from pipelines.home.home import Home
from pipelines.planning.certificates import _enumerated
from pipelines.replay.objectives import alternatives
from pipelines.replay.run import replay_run
from rpg.certificate.certificate import certify
from rpg.objectives import TokenBatch, evaluate_objective
from specs import SpecError, load_experiment, parse_objective
from specs.json_schema import json_schema
from specs.reading.recorded import recorded_spec
from specs.schema.objective import PackagedObjective
from tests.rpg.tiny_run import finish, make_inputs, make_run, rows, start_anew

NAMED = {"type": "second_moment", "most": 0.02}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))


def test_a_spec_names_it_and_its_options_are_checked_like_ours() -> None:
    objective = parse_objective(NAMED)
    assert isinstance(objective, PackagedObjective)
    assert objective.identity()["type"] == "second_moment (rpg-second-moment 1.0)"
    assert parse_objective(json.loads(objective.model_dump_json())) == objective
    with pytest.raises(SpecError) as caught:
        parse_objective({"type": "second_moment", "mst": 0.02})
    assert "objective.mst: unknown field" in str(caught.value)
    assert "did you mean `most`?" in str(caught.value)
    with pytest.raises(SpecError, match=r"objective\.most: must be greater than 0"):
        parse_objective({"type": "second_moment", "most": 0})
    with pytest.raises(SpecError, match=r"objective\.type: unknown type"):
        parse_objective({"type": "third_moment"})


def test_the_json_schema_of_an_installation_has_it() -> None:
    shown = json_schema("experiment")["$defs"]["File"]["properties"]["objective"]["oneOf"]
    (form,) = (form for form in shown if form.get("properties", {}).get("type", {}).get("const") == "second_moment")
    assert form["properties"]["most"]["exclusiveMinimum"] == 0
    assert "second_moment" not in json.dumps(json_schema("experiment", installed=False))


def test_its_options_can_be_set_by_their_paths_and_published_settings_are_taken() -> None:
    starter = ROOT / "specs/experiments/starter.yaml"
    named = ["objective={type: second_moment}", "objective.most=0.5"]
    experiment = load_experiment(starter, overrides=named)
    assert experiment.objective.model_dump() == {"type": "second_moment", "aggregation": "token_mean", "most": 0.5}
    with pytest.raises(SpecError, match="unknown field"):
        load_experiment(starter, overrides=[*named, "objective.mst=1"])


def test_tokens_that_moved_most_are_dropped_until_the_second_moment_is_bounded() -> None:
    values = inputs(50, 10, dtype=torch.float64, spread=0.5)
    found = evaluate_objective(parse_objective(NAMED), TokenBatch(**values))
    mask = values["response_mask"] != 0
    squares = (values["logprobs"] - values["old_logprobs"]).square()
    kept = mask & ~found.clipped
    assert 0 < kept.sum() < mask.sum()
    assert squares[kept].mean() <= 0.02 < squares[kept | (squares == squares[mask & ~kept].min())].mean()
    assert torch.equal(found.weight[kept], (found.ratio * values["advantages"])[kept])
    assert not found.weight[~kept].any()


def test_its_claim_is_certified_and_a_false_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = certify(parse_objective(NAMED))
    assert (certificate.claim, certificate.holds) == ("on_policy", True)
    assert certificate.finding("off_policy", "apart").error > 0.1
    experiment = load_experiment(ROOT / "specs/experiments/starter.yaml", overrides=["objective={type: second_moment}"])
    assert _enumerated(experiment).issues == ()
    monkeypatch.setattr(type(experiment.objective), "exact", property(lambda _self: "always"))
    (issue,) = _enumerated(experiment).issues
    assert issue.message == "the claim is false"


@pytest.mark.more
def test_it_trains_is_recorded_and_is_replayed(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    run = make_run(tmp_path, tmp_path / "home/runs/tiny", training={"steps": 2, "optimizer": {"learning_rate": 0.03}})
    spec = json.loads((run / "spec.json").read_text())
    (run / "spec.json").write_text(json.dumps({**spec, "objective": {"type": "second_moment", "most": 1e-3}}))
    (run / "run.json").write_text(json.dumps({"run_id": "tiny", "experiment": "tiny", "name": "tiny", "seed": 0}))
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    finish(start_anew([sys.executable, "-m", "rpg.train", str(run)], {"PYTHONPATH": path}))
    values = {(row["step"], row["name"]): row["value"] for row in rows(run, "metrics")}
    assert values[2, "clip_fraction/high"] + values[2, "clip_fraction/low"] > 0
    assert json.loads((run / "certificate.json").read_text())["claim"] == "on_policy"
    (replayed,) = replay_run(Home(tmp_path / "home"), "tiny", alternatives(recorded_spec(run)))
    assert replayed.as_json()["reproduced"]["loss"] < 1e-6
