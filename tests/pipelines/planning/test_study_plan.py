"""The plan of a study: its lowest and highest cost before anything runs, and finished work."""

import json
from pathlib import Path

import pytest
from recorded_study import arm, confirmation, pruned, record, study, trial
from tiny_study import EXPERIMENT, write_study
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.home.home import Home
from pipelines.planning.gpu_hours import evaluation_hours, gpu_hours
from pipelines.planning.model_shape import model_shape
from pipelines.studies.cost import StudyCost, least_steps, study_cost
from specs import load_study_document
from specs.schema.study import Study

STEPS = ("experiment: tiny.yaml\n", "experiment: tiny.yaml\noverrides: {training.steps: 8}\n")
ASHA = ("trials: 8\n", "trials: 9\npruner: {type: asha, rungs: [2, 4], eta: 2}\n")
CONFIRM = ("goal:", "confirm: {candidates: 2, seeds: 5}\ngoal:")


def cost(directory: Path, *changes: tuple[str, str]) -> StudyCost:
    return study_cost(load_study_document(write_study(directory, *changes)))


def study_with(pruner: dict[str, object]) -> Study:
    goal = {"dataset": "d", "metric": "mean@1"}
    space = {"objective.clip.low": {"float": [0.1, 0.2]}}
    common = {"name": "s", "experiment": "e.yaml", "parameters": space, "goal": goal, "trials": 9}
    return Study.model_validate(common | {"pruner": pruner})


def test_without_pruning_the_best_case_is_the_worst(tmp_path: Path) -> None:
    planned = cost(tmp_path, STEPS)
    assert planned.best == planned.worst
    assert (planned.trials, planned.seeds, planned.worst.runs) == (8, (0, 1), 16)
    # 8 trials x 2 seeds x 8 steps; a step samples 4 prompts x 4 responses of 6 tokens.
    assert planned.worst.steps == 128
    assert planned.worst.tokens == 128 * 4 * 4 * 6
    # Every run's last checkpoint, and the base model with the baseline's two: 20 problems x 8 samples.
    assert planned.worst.evaluation_samples == (16 + 2) * 20 * 8
    assert planned.confirmation.runs == 0


def test_gpu_hours_of_a_study_are_those_of_its_steps_and_evaluations(tmp_path: Path) -> None:
    """16 runs, and 18 checkpoints: each run's last, and the base model with the baseline's two."""
    document = load_study_document(write_study(tmp_path, STEPS))
    experiment = document.experiment.experiment
    shape = model_shape(experiment)
    run, each = gpu_hours(experiment, shape), evaluation_hours(experiment, shape)
    assert each
    assert study_cost(document).worst.gpu_hours == pytest.approx(16 * (run.sampling + run.training) + 18 * each)


def test_successive_halving_costs_least_where_half_goes_on(tmp_path: Path) -> None:
    planned = cost(tmp_path, STEPS, ASHA)
    # The baseline to step 8; of eight others four end at 2, two at 4, two at 8; two seeds each.
    assert planned.best.steps == 2 * (8 + 4 * 2 + 2 * 4 + 2 * 8)
    assert planned.best.trained_to_end == 2 * 3
    assert planned.worst.steps == 2 * 9 * 8
    # Ends: 1 + 2. Rungs: eight trials at 2, four at 4. The base model once. Two seeds.
    assert planned.best.evaluation_samples == (3 + 8 + 4 + 1) * 2 * 20 * 8


def test_the_confirmation_is_the_baseline_and_the_candidates_on_fresh_seeds(tmp_path: Path) -> None:
    planned = cost(tmp_path, STEPS, CONFIRM)
    assert planned.confirmation.runs == planned.confirmation.trained_to_end == 3 * 5
    assert planned.confirmation.steps == 3 * 5 * 8
    assert planned.confirmation.evaluation_samples == (15 + 5) * 20 * 8


@pytest.mark.parametrize(
    ("pruner", "ends"),
    [
        ({"type": "none"}, [8] * 9),
        ({"type": "asha", "rungs": [2, 4], "eta": 3}, [8, 2, 2, 2, 2, 2, 2, 4, 8]),  # one of the two at 4 goes on
        ({"type": "asha", "rungs": [2], "eta": 9}, [8, 2, 2, 2, 2, 2, 2, 2, 8]),
        # Brackets in turn: trials 2, 4, 6, 8 begin at 2, trials 1, 3, 5, 7 at 4.
        ({"type": "hyperband", "rungs": [2, 4], "eta": 2}, [8, 2, 2, 4, 8, 4, 4, 8, 8]),
        ({"type": "median", "rungs": [2, 4], "startup_trials": 4}, [8, 8, 8, 8, 2, 2, 2, 2, 2]),
        ({"type": "patient", "rungs": [2, 4], "patience": 1}, [8, 4, 4, 4, 4, 4, 4, 4, 4]),
        ({"type": "patient", "rungs": [2, 4], "patience": 2}, [8] * 9),
    ],
)
def test_each_pruner_lets_no_more_go_on_than_it_has_to(pruner: dict[str, object], ends: list[int]) -> None:
    assert least_steps(study_with(pruner), 9, 8) == ends
    assert least_steps(study_with(pruner), 1, 8) == [8]


def test_a_grid_has_no_more_trials_than_combinations(tmp_path: Path) -> None:
    ranges = (
        "  objective.clip.low: {float: [0.05, 0.5]}\n  objective.clip.high: {float: [0.05, 1.0], log: true}\n",
        "",
    )
    planned = cost(tmp_path, ranges, ("sampler: {startup_trials: 3}", "sampler: {type: grid}"))
    assert planned.trials == 4


def test_what_cannot_be_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"problem": "1 + 1 =", "answer": "2"}\n' * 4)
    own = "    - {name: own, source: jsonl, path: problems.jsonl}\n"
    text = EXPERIMENT.replace("    - name: two-terms\n", own + "    - name: two-terms\n")
    (tmp_path / "tiny.yaml").write_text(text)
    assert study_cost(load_study_document(path)).worst.evaluation_samples is None


def test_the_command_shows_space_cost_and_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    monkeypatch.setenv("RPG_HOME", str(home.root))
    budget = ("sampler:", "budget: {tokens: 2e6, hours: 3}\nsampler:")
    question = ("question: Which clip?", "question: Which [bold]clip[/bold], [/]?")
    path = write_study(tmp_path / "specs", STEPS, ASHA, CONFIRM, budget, question)
    before = CliRunner().invoke(app, ["plan", str(path)])
    assert before.exit_code == 0, before.output
    lines = [" ".join(line.split()) for line in before.output.splitlines()]
    assert any(line.endswith("Which [bold]clip[/bold], [/]?") for line in lines)
    assert "objective.clip.high 0.05 to 1, log 0.28" in lines
    assert "reference.update.every_steps whole, 1 to 2 2" in lines
    assert "search, at best at worst confirmation, at worst all, at worst" in lines
    assert "steps of training 80 144 120 264" in lines
    assert "search 9 trials, each with seeds 0, 1; sampler auto, asha at steps 2, 4 (eta 2)" in lines
    rounds = "in rounds, compared after 2, 3 and 5"
    assert f"confirm the baseline and the best 2 trials, each on at most 5 fresh seeds {rounds}" in lines
    aside = "minus the largest cost of the confirmation, estimated from the baseline's, but at most half"
    ends = f"budget the search ends after 2 M response tokens or 3 hours, {aside}; trials in progress are finished"
    assert ends in lines
    assert "shared data RUN, base RUN" in lines
    assert not [line for line in lines if line.startswith("GPU hours")], "too few to be shown"
    assert not [line for line in lines if line.startswith("done")]
    arms = arm(0, [0.5] * 5), arm(1, [0.5, 0.6, None, None, None])
    record(home, study([trial(0, 0.5), trial(1, 0.6), pruned(2, 0.4)], confirmation=confirmation(*arms)))
    data = json.loads(CliRunner().invoke(app, ["plan", str(path), "--json"]).output)
    assert data["search"]["worst"]["steps"] == 144
    assert data["done"]["trials"] == {"finished": 2, "pruned": 1}
    assert data["done"]["confirmation"] == {"runs": 10, "ended": 7}
    after = " ".join(CliRunner().invoke(app, ["plan", str(path)]).output.split())
    assert "done trials: 2 finished, 1 pruned; 7 of 10 runs of the confirmation; spent 2250 tokens" in after


def test_a_study_whose_experiment_is_wrong_is_refused_as_elsewhere(tmp_path: Path) -> None:
    path = write_study(tmp_path, ("experiment: tiny.yaml", "experiment: other.yaml"))
    assert CliRunner().invoke(app, ["plan", str(path)]).exit_code != 0
