"""Every spec file in the repository loads, asks a question on its first line, and warns of nothing."""

from pathlib import Path

import pytest

import specs
from specs.document import Document
from specs.expand import expand
from specs.loader import load_either

HERE = Path(specs.__file__).parent
FILES = sorted([*(HERE / "experiments").rglob("*.yaml"), *(HERE / "studies").rglob("*.yaml")])


def test_there_are_specs_to_load():
    assert {"quickstart.yaml", "starter.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_spec_loads_and_says_what_it_answers(file):
    document = load_either(file)
    if isinstance(document, Document):
        assert expand(document)
    first = file.read_text("utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert "?" in first
    assert not document.warnings
