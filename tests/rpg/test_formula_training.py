"""Training with an objective that the spec writes as a formula: the record, the certificate, and replay."""

import json
import math
import sys
from typing import Any

import pytest

from pipelines.home.home import Home
from pipelines.replay.objectives import alternatives
from pipelines.replay.run import replay_run
from specs.reading.recorded import recorded_spec
from tests.rpg.tiny_run import finish, make_inputs, make_run, rows, start, weights

pytestmark = pytest.mark.more

CLIP = {"type": "dual", "low": 0.01, "high": 0.02}
BUILT_IN = {"type": "rpg", "kl_coef": 0.1, "clip": CLIP}
HELD = "clip(w, 1 - low, 1 + high)"
FORMULA: dict[str, Any] = {
    "type": "formula",
    "parameters": {"beta": 0.1, "low": 0.01, "high": 0.02, "dual": 10.0},
    "weight": f"""where(A > 0 and w < 1 + high or A <= 0 and 1 - low <= w < dual,
                        w*A - beta*{HELD}*(log({HELD}) - log(q)), 0)""",
    "clipped": "A > 0 and w >= 1 + high or A <= 0 and (w < 1 - low or w >= dual)",
    "claim": {"divergence": "unnormalized_reverse", "kl_coef": "beta", "exact": "on_policy"},
}
EVERYTHING: dict[str, Any] = {
    **FORMULA,
    "parameters": {"beta": {"schedule": [[1, 0.1], [3, 0.2]], "between": "linear"}},
    "weight": "w*A*clip(p_old/p_engine, 0.5, 2) + beta*H + 1e-3*R*position/length - beta*to_go(log(r))",
    "clipped": "p_old > 2*p_engine",
    "claim": "none",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    place = tmp_path_factory.mktemp("formulas")
    make_inputs(place)
    made = []
    for name, objective in {"built-in": BUILT_IN, "formula": FORMULA, "everything": EVERYTHING}.items():
        run = make_run(place, place / "home/runs" / name, training={"steps": 3, "optimizer": {"learning_rate": 0.03}})
        spec = json.loads((run / "spec.json").read_text())
        (run / "spec.json").write_text(json.dumps({**spec, "objective": objective}))
        (run / "run.json").write_text(json.dumps({"run_id": name, "experiment": "tiny", "name": name, "seed": 0}))
        made.append(str(run))
    finish(start([sys.executable, "-m", "tests.rpg.train_worker", *made]), seconds=400)
    return Home(place / "home")


def metrics(home: Home, run: str) -> dict[tuple[int, str], float]:
    return {(row["step"], row["name"]): row["value"] for row in rows(home.run(run), "metrics")}


def test_a_formula_trains_what_the_built_in_objective_trains_and_records_the_same(home: Home) -> None:
    built_in, formula = metrics(home, "built-in"), metrics(home, "formula")
    assert built_in.keys() == formula.keys()
    for (step, name), value in built_in.items():
        if not name.startswith(("time/", "tokens_per", "memory/")):
            assert formula[step, name] == pytest.approx(value, rel=1e-4, abs=1e-7), (step, name)
    clipped = [value for (_, name), value in formula.items() if name.startswith("clip_fraction")]
    assert max(clipped) > 0.05, "a clip that never fires would prove little"
    one, other = weights(home.run("built-in")), weights(home.run("formula"))
    assert all(one[name].allclose(other[name], atol=1e-5) for name in one)


def test_the_certificate_and_the_numbers_that_change_are_on_record(home: Home) -> None:
    certificate = json.loads((home.run("formula") / "certificate.json").read_text())
    assert (certificate["claim"], certificate["holds"], certificate["not_covered"]) == ("on_policy", True, {})
    steps = json.loads((home.run("everything") / "certificate.json").read_text())["steps"]
    assert [(step, each["claim"]) for step, each in steps.items()] == [("1", "never"), ("2", "never"), ("3", "never")]
    values = {step: value for (step, name), value in metrics(home, "everything").items() if name == "parameter/beta"}
    assert values == pytest.approx({1: 0.1, 2: 0.15, 3: 0.2})
    assert all(map(math.isfinite, metrics(home, "everything").values()))


@pytest.mark.parametrize("run", ["formula", "everything"])
def test_replay_gives_back_what_was_recorded(home: Home, run: str) -> None:
    spec = recorded_spec(home.run(run))
    (replayed,) = replay_run(home, run, alternatives(spec))
    found = replayed.as_json()["reproduced"]
    assert found["holds"], found
    assert found["clipped"] == 0
    assert max(found["ratio"], found["advantage"], found["loss"]) < 1e-6


def test_replay_takes_a_formula_beside_another_objective_and_sweeps_its_numbers(home: Home) -> None:
    spec = recorded_spec(home.run("built-in"))
    (same,) = replay_run(home, "built-in", alternatives(spec, [json.dumps(FORMULA)]))
    assert same.as_json()["overall"]["cosine"] == pytest.approx(1, abs=1e-6)
    swept = replay_run(
        home, "built-in", alternatives(spec, [json.dumps(FORMULA)], sweeps=["objective.parameters.beta=0,3"])
    )
    cosines = [each.as_json()["overall"]["cosine"] for each in swept]
    assert cosines[1] < cosines[0]
