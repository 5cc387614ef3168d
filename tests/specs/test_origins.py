"""Where each value of a run's spec comes from."""

from spec_text import GOOD, write

from specs.document import expand
from specs.errors import dotted
from specs.loader import load_document
from specs.origins import Origin, origins_of

MATRIX = """\
extends: spec.yaml
seeds: [3, 4]
objective: {kl_coef: 0.02}
matrix:
  zip:
    advantage.baseline: [batch_mean, none]
  product:
    objective.clip: [{type: none}, {type: dual, low: 0.1}]
"""


def origins(file: str, *overrides: str, run: int = -1) -> dict[str, Origin]:
    """By dotted path, of one of the file's runs."""
    document = load_document(file, overrides)
    cell = expand(document)[run]
    return {dotted(origin.path): origin for origin in origins_of(document, cell.values, cell.experiment)}


def test_every_value_of_a_spec_has_one_origin() -> None:
    write(GOOD)
    found = origins("spec.yaml", "training.steps=8")
    places = {path: (origin.kind, origin.file, origin.line) for path, origin in found.items()}
    assert places["objective.kl_coef"] == ("file", "spec.yaml", 15)
    assert places["objective.clip.low"] == ("file", "spec.yaml", 18)
    assert places["data.evaluation.0.seed"] == ("file", "spec.yaml", 9)
    assert places["training.steps"] == ("set", "", 0)
    assert places["advantage.baseline"] == ("published", "", 0)
    assert places["objective.clip.dual"] == ("default", "", 0)
    assert places["seeds"] == ("default", "", 0)
    assert places["warm_up"] == ("default", "", 0)
    assert "matrix" not in places


def test_files_that_are_extended_and_the_matrix_are_told_apart() -> None:
    write(GOOD)
    write(MATRIX, "other.yaml")
    found = origins("other.yaml")
    places = {path: (origin.kind, origin.file, origin.line) for path, origin in found.items()}
    assert places["objective.type"] == ("file", "spec.yaml", 14)
    assert places["objective.kl_coef"] == ("file", "other.yaml", 3)
    assert places["seeds"] == ("matrix", "other.yaml", 2)
    assert places["advantage.baseline"] == ("matrix", "other.yaml", 6)
    assert places["objective.clip.low"] == ("matrix", "other.yaml", 8)
    assert places["objective.clip.high"] == ("default", "", 0)


def test_a_list_is_one_value_and_a_schedule_one_too() -> None:
    write(GOOD.replace("kl_coef: 1e-2", "kl_coef: {schedule: [[0, 0.1], [4, 0.2]], between: linear}"))
    found = origins("spec.yaml")
    assert found["objective.kl_coef.schedule"].kind == "file"
    assert found["objective.kl_coef.between"].kind == "file"
    assert found["training.optimizer.betas"].kind == "default"
