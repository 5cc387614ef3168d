"""A study on the dashboard: one artifact that is renewed, and that nothing depends on."""

import logging
from pathlib import Path

import pytest
from recorded_study import arm, confirmation, pruned, study, trial

from pipelines.home.home import Home
from pipelines.prefect.server.api import Api
from pipelines.studies.answers.dashboard import publish_study, study_markdown
from pipelines.studies.answers.results import StudyRecord

RECORD = StudyRecord.of(study([trial(0, 0.5), trial(1, 0.6, reason="a | b"), pruned(2, 0.4)]))


def test_the_markdown_has_the_answer_the_counts_and_the_best_trials_first(tmp_path: Path) -> None:
    lines = study_markdown(Home(tmp_path), RECORD).splitlines()
    assert lines[2].startswith("**Candidate: clip.low")
    assert "3 of 3 trials ended, 2 finished, 1 pruned, 2250 tokens, 1.5 GPU hours, 6 min" in lines
    rows = [line for line in lines if line.startswith("| ") and line[2].isdigit()]
    assert [row[2] for row in rows] == ["1", "0", "2"]
    assert "a \\| b" in rows[0]
    assert "40.0 % at step 15" in rows[2]


def test_the_markdown_of_a_confirmed_study_has_its_arms(tmp_path: Path) -> None:
    arms = arm(0, [0.5, 0.51, 0.5, 0.51, 0.5]), arm(1, [0.6, 0.61, 0.6, 0.61, 0.6])
    text = study_markdown(Home(tmp_path), StudyRecord.of(study([trial(0, 0.5)], confirmation=confirmation(*arms))))
    assert "Trial 1 is best: 60.4 %. It beats the baseline by 10.0 points [" in text
    assert "| trial 1 | 60.4 %" in text


def test_an_api_that_is_away_costs_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), caplog.at_level(logging.WARNING):
        publish_study(Home(tmp_path), RECORD)
    assert "the dashboard does not show the progress of study clips" in caplog.text


@pytest.mark.more
def test_the_artifact_is_renewed_under_one_key(tmp_path: Path) -> None:
    from prefect.client.orchestration import get_client

    home = Home(tmp_path)
    with Api(home) as api, api.connected():
        for record in (StudyRecord.of(study([trial(0, 0.5)])), RECORD):
            publish_study(home, record)
        with get_client(sync_client=True) as client:
            (latest,) = client.read_latest_artifacts()
    assert latest.key == "study-clips"
    assert "2 finished" in str(latest.data)
