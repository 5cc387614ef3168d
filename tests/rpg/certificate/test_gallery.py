"""Published objectives as formulas, `specs/objectives`: each has the certificate that its file says."""

from pathlib import Path

import pytest
from places import ROOT

from rpg.certificate.certificate import certify_experiment
from rpg.certificate.finite import refused
from rpg.certificate.reading import off
from specs.document import expand
from specs.loader import load_document
from specs.schema.objective import FormulaObjective

GALLERY = sorted((ROOT / "specs" / "objectives").glob("*.yaml"))


def test_the_gallery_is_there() -> None:
    assert {"sapo", "dppo-tv", "dcpo", "gmpo"} <= {file.stem for file in GALLERY}


@pytest.mark.parametrize("file", GALLERY, ids=lambda file: file.stem)
def test_a_published_objective_has_the_certificate_that_its_file_says(file: Path) -> None:
    cells = expand(load_document(file))
    lines = []
    for cell in cells:
        objective = cell.experiment.objective
        assert isinstance(objective, FormulaObjective)
        assert refused(objective) is None
        (certificate,) = certify_experiment(cell.experiment).values()
        assert certificate.holds
        record = certificate.as_json()
        when = {"never": "no claim", "always": "exact always", "on_policy": "exact on policy"}[certificate.claim]
        name = f"{cell.label}: " if len(cells) > 1 else ""
        lines.append(f"#   {name}{when}; on policy {off(record, 'on_policy')}, off policy {off(record, 'off_policy')}")
    text = file.read_text(encoding="utf-8").splitlines()
    start = text.index("# Certificate:") + 1
    assert text[start : start + len(lines)] == lines
    assert any(line.startswith("# Source: ") for line in text)
    assert any(line.startswith("# Differs: ") for line in text)
