"""A flow run executes the frozen document whose digest it names, and nothing that stands in its parameters."""

from pathlib import Path
from typing import Any

import pytest
from live import SPEC
from tiny_study import EXPERIMENT, STUDY

from pipelines.prefect.flows import frozen, schedules
from pipelines.prefect.flows.flow import execute_run
from pipelines.studies.flow import run_study_flow
from specs.errors import SpecError, render
from specs.loader import load_document, load_study_document


@pytest.fixture
def inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The document itself, where its digest should be."""
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return load_document(tmp_path / "tiny.yaml").to_json()


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(SpecError) as error:
        call(*arguments)
    return render(error.value.issues)


def test_a_document_in_the_parameters_of_a_flow_run_is_not_executed(inline: dict[str, Any], tmp_path: Path) -> None:
    for call, arguments in (
        (execute_run.fn, ("tiny", "tiny-s0", inline)),
        (schedules.submit_scheduled.fn, ("tiny", inline, "rpg", "normal")),
    ):
        assert "the flow run does not name its frozen spec by a digest" in refused(call, *arguments)
    assert not (tmp_path / "home").exists()


def test_a_study_in_the_parameters_of_a_flow_run_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.yaml").write_text(EXPERIMENT)
    (tmp_path / "study.yaml").write_text(STUDY)
    study = load_study_document(tmp_path / "study.yaml").to_json()
    assert "hint: submit the spec again" in refused(run_study_flow.fn, "study tiny", study)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "given", ["", "latest", '{"source": {}}', "0" * 63, "A" * 64, "0" * 64 + "\n", None, ["0" * 64]]
)
def test_no_server_is_asked_for_what_is_no_digest(given: Any) -> None:
    assert f"given: {given!r}" in refused(frozen.fetch, given)
