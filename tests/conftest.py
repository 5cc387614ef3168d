"""What tests of several packages begin with."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny base model and its data: see tests/rpg/tiny_run.py."""
    from tests.rpg.tiny_run import make_inputs

    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    return directory
