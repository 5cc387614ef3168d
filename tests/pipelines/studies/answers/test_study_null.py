"""A study whose trials are all equal by construction finds no difference, whatever its search came upon."""

import re
from pathlib import Path

import numpy as np
import pytest
from recorded_home import record_run
from recorded_study import measured
from tiny_trials import search, study_document

from pipelines.home.home import Home
from pipelines.studies.answers.answer import answer
from pipelines.studies.answers.results import best_of, read_study
from pipelines.studies.execution import Result
from pipelines.studies.trials import Score, Trial

LUCK, ERROR = 0.02, 0.03
"""Standard deviations of a seed's accuracy, and of what a trial of the search measures."""


def conclude(monkeypatch: pytest.MonkeyPatch, home: Home, directory: Path, seed: int, gain: float = 0.0) -> str:
    """Runs a study whose trials differ from the baseline by `gain`, its confirmation recorded run by run."""
    name = f"equal-{seed}"
    document = study_document(
        directory / name,
        name=name,
        sampler={"seed": seed, "startup_trials": 3},
        trials=8,
        confirm={"candidates": 2, "seeds": 5},
    )
    rng = np.random.default_rng(seed)

    def outcome(trial: Trial, step: int) -> Result:
        after = 0.6 + gain * (not trial.baseline)
        if "arm" not in trial.about:
            value = after + float(rng.normal(0, ERROR))
            return Result((f"{name}-t{trial.number}",), (Score(value, value - 0.06, value + 0.06),), paused_at=step)
        run_id = f"{name}-a{trial.about['arm']}-s{trial.about['seed']}"
        lucky = after + float(rng.normal(0, LUCK))
        record_run(home, run_id, seed=trial.about["seed"], after=lucky, steps=1, problems=20, experiment=name)
        return Result((run_id,), (Score(measured(home.run(run_id)), None, None),))

    search(monkeypatch, document, home, outcome)
    return name


@pytest.mark.more
@pytest.mark.parametrize("studies", [6, pytest.param(20, marks=pytest.mark.long)])
def test_of_studies_of_equal_trials_none_claims_a_best_or_a_difference_from_the_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, studies: int
) -> None:
    homes = [Home(tmp_path / f"home-{seed}") for seed in range(studies)]
    names = [conclude(monkeypatch, home, tmp_path, seed) for seed, home in enumerate(homes)]
    records = [read_study(home, name) for home, name in zip(homes, names, strict=True)]
    sentences = [answer(home, record).sentence for home, record in zip(homes, records, strict=True)]
    claims = [sentence for sentence in sentences if "measurably" not in sentence]
    assert [sentence for sentence in claims if "baseline" in sentence] == []
    # Between candidates: all pairs hold together in 95 % of studies, so that one of them may say something false.
    assert len(claims) <= 1
    assert [sentence for sentence in sentences if " is best:" in sentence] == []
    # The search alone flatters its best in nearly every one of them.
    flattered = [max(trial.value for trial in record.finished) for record in records]
    assert sum(value > 0.6 + ERROR for value in flattered) >= 0.75 * studies
    assert {record.status for record in records} == {"finished"}


def test_a_study_of_better_trials_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    record = read_study(home, conclude(monkeypatch, home, tmp_path, seed=1, gain=0.15))
    assert re.search(r"rials? .* (beats|beat) the baseline, by ", answer(home, record).sentence)
    best = best_of(record)
    assert best.standing == "confirmed"
