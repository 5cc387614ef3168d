"""The sanity checks of regularized policy gradient, in small: the specs that ask them, with a tiny model and few steps,
trained by the real trainer, their records compared with formulas written out here."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import specs
from rpg.certificate.certificate import certify
from specs.document import Cell, expand
from specs.loader import load_document
from tests.rpg.tiny_run import rows, train

pytestmark = pytest.mark.long
SANITY = Path(specs.__file__).parent / "experiments" / "sanity"
TINY = (
    "data.evaluation=[]",
    "training.prompts_per_step=4",
    "training.group_size=8",
    "training.optimizer.learning_rate=0.02",
    "training.schedule.warmup_updates=0",
)


STEPS = (1, 2, 3)
UNNORMALISED = ("unnormalised forward", "unnormalised reverse")
FORMS = (
    *(f"{form}, objective.estimator reinforce" for form in ("REINFORCE", "forward", *UNNORMALISED)),
    f"{UNNORMALISED[1]}, objective.estimator differentiable",
)
SIDES = {"open": "", "low 0.02": "low", "high 0.02": "high", "dual 1.05": "dual"}
"""Cell of the sweep -> the side whose bound is in reach."""
Trained = dict[str, tuple[Cell, Path]]


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Cells of the three specs, trained: spec -> label -> (cell, run's directory)."""
    runs = tmp_path_factory.mktemp("runs")
    off_policy = "training.minibatches=4"
    found = {
        "on-policy-equivalence": prepare("on-policy-equivalence", inputs, runs, only=FORMS),
        "divergence-weighting": prepare("divergence-weighting", inputs, runs, "training.steps=2", off_policy),
        "clip-sweep": prepare(
            "clip-sweep", inputs, runs, f"training.steps={len(STEPS)}", off_policy, only=tuple(SIDES)
        ),
    }
    for cells in found.values():
        for _, run_dir in cells.values():
            train(run_dir)
    return found


def prepare(name: str, inputs: Path, runs: Path, *overrides: str, only: tuple[str, ...] = ()) -> Trained:
    """A run's directory for each cell of a spec, or for those with the labels given."""
    cells = expand(load_document(SANITY / f"{name}.yaml", (*TINY, *overrides)))
    chosen = {cell.label: (cell, runs / name / cell.label) for cell in cells if not only or cell.label in only}
    assert len(chosen) == len(only or cells)
    for label, (cell, run_dir) in chosen.items():
        run_dir.mkdir(parents=True)
        where = {part: os.path.relpath(inputs / part, run_dir) for part in ("data", "base")}
        (run_dir / "spec.json").write_text(cell.experiment.model_dump_json())
        (run_dir / "inputs.json").write_text(json.dumps({"run_id": label, "fingerprint": "f" * 64, **where}))
    return chosen


def weights_of(run_dir: Path) -> Mapping[str, np.ndarray]:
    (file,) = (run_dir / "weights").glob("step-*/model.safetensors")
    return load_file(file)


def metrics_of(run_dir: Path) -> dict[tuple[int, str], float]:
    return {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}


def tokens_of(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """The step's tokens as columns, with w, log r and the advantage of each."""
    advantages = {row["rollout_id"]: row["advantage"] for row in rows(run_dir, "rollouts") if row["step"] == step}
    table: list[dict[str, Any]] = [row for row in rows(run_dir, "tokens") if row["step"] == step]
    columns = {name: np.array([row[name] for row in table]) for name in table[0]}
    columns["w"] = np.exp(columns["logprob"] - columns["old_logprob"])
    columns["log_r"] = columns["logprob"] - columns["ref_logprob"]
    columns["advantage"] = np.array([advantages[number] for number in columns["rollout_id"]])
    return columns


def test_with_one_policy_all_forms_of_rpg_make_the_update_of_reinforce(
    inputs: Path, trained: dict[str, Trained]
) -> None:
    cells = trained["on-policy-equivalence"]
    plain = cells[FORMS[0]][1]
    seen, updated = metrics_of(plain), weights_of(plain)
    before = load_file(inputs / "base" / "model.safetensors")
    assert max(np.abs(updated[name] - before[name]).max() for name in before) > 0.01, "the update moved the policy"
    assert seen[1, "weight/variance"] > 0.01
    for label, (cell, run_dir) in cells.items():
        found = metrics_of(run_dir)
        # The weight is A plus a constant, so that its variance is A's.
        assert found[1, "weight/variance"] == pytest.approx(seen[1, "weight/variance"], rel=1e-4), label
        assert found[1, "ratio/max"] == 1, label
        apart = max(np.abs(updated[name] - there).max() for name, there in weights_of(run_dir).items())
        if label.startswith("forward"):
            assert apart > 1e-3, "kl_coef 1 shows in a sample"
            assert found[1, "grad_norm"] != pytest.approx(seen[1, "grad_norm"], rel=1e-3)
        else:
            assert apart < 1e-4, label  # Adam makes an update of any gradient, of rounding too
            assert found[1, "grad_norm"] == pytest.approx(seen[1, "grad_norm"], rel=1e-5), label
        on_policy = certify(cell.experiment.objective).finding("on_policy", "sampler")
        assert on_policy.error < 1e-10, f"{label}: in expectation all are REINFORCE's"


PENALTIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "k1": lambda w, log_r: 1 + 0 * w * log_r,
    "k1 weighted": lambda w, log_r: w * (log_r + 1),
    "k2": lambda w, log_r: log_r + 0 * w,
    "k2 weighted": lambda w, log_r: w * (log_r + log_r**2 / 2),
    "k3": lambda w, log_r: 1 - np.exp(-log_r) + 0 * w,
    "k3 weighted": lambda w, log_r: w * log_r,
}
"""What weighs the score of a token in the divergence's gradient, as the spec's header has it."""


def test_the_importance_weight_changes_the_gradient_of_a_divergence_as_its_formula_says(
    trained: dict[str, Trained],
) -> None:
    cells = trained["divergence-weighting"]
    assert set(cells) == set(PENALTIES)
    for label, (cell, run_dir) in cells.items():
        tokens, objective = tokens_of(run_dir, step=2), cell.experiment.objective
        w, advantage, clip = tokens["w"], tokens["advantage"], objective.clip
        assert (w.min() < 0.9) & (w.max() > 1.1), "off policy"
        assert np.abs(tokens["log_r"]).max() > 0.2, "and away from the reference"
        active = np.where(advantage > 0, w <= 1 + clip.high, (w >= 1 - clip.low) & (w <= clip.dual))
        reward = np.where(active, advantage * w, 0)
        variances = {
            name: np.var(reward - objective.kl_coef * penalty(w, tokens["log_r"]))
            for name, penalty in PENALTIES.items()
        }
        recorded = metrics_of(run_dir)[2, "weight/variance"]
        assert variances.pop(label) == pytest.approx(recorded, rel=1e-4), label
        others = np.array(list(variances.values()))
        assert np.all(np.abs(others - recorded) > 1e-3 * recorded), "no other formula gives it"


def test_each_bound_of_the_clip_acts_on_its_own_side_only(trained: dict[str, Trained]) -> None:
    cells = trained["clip-sweep"]
    for label, side in SIDES.items():
        cell, run_dir = cells[label]
        clip, metrics = cell.experiment.objective.clip, metrics_of(run_dir)
        acted = set()
        for step in STEPS:
            tokens = tokens_of(run_dir, step)
            w, gains = tokens["w"], tokens["advantage"] > 0
            dropped = {
                "high": gains & (w >= 1 + clip.high),
                "low": ~gains & (w < 1 - clip.low),
                "dual": ~gains & (w >= clip.dual),
            }
            for name, where in dropped.items():
                assert metrics[step, f"clip_fraction/{name}"] == pytest.approx(where.mean(), abs=1e-6)
            assert (tokens["clipped"] == np.logical_or.reduce(list(dropped.values()))).all()
            acted |= {name for name, where in dropped.items() if where.any()}
        assert acted == ({side} if side else set()), label
    first = {label: tokens_of(cells[label][1], 1)["token_id"].tolist() for label in SIDES}
    assert all(tokens == first["open"] for tokens in first.values()), "all begin with the same responses"
    ended = {label: weights_of(cells[label][1])["model.embed_tokens.weight"] for label in SIDES}
    assert all(np.abs(ended[label] - ended["open"]).max() > 1e-3 for label in SIDES if label != "open")
