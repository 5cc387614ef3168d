"""Reading: YAML 1.2, extends, settings, paths, the frozen form."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from spec_text import GOOD, changed, message, write

from specs import Document, SpecError, load_document, load_experiment, parse_objective
from specs.document import expand
from specs.errors import Position, render
from specs.reading.yaml import parse_bytes
from specs.schema.base import Spec, is_open


def test_scalars_follow_yaml_1_2():
    text = b"a: 1e-4\nb: no\nc: 08\nd: 12:30:00\ne: 0x1F\nf: 0o17\ng: 'true'\nh: +1.5\ni: ~\nj: 1_000\nk: TRUE\nl: .5\n"
    assert parse_bytes(text, "x").plain() == {
        "a": 1e-4,
        "b": "no",
        "c": 8,
        "d": "12:30:00",
        "e": 31,
        "f": 15,
        "g": "true",
        "h": 1.5,
        "i": None,
        "j": "1_000",
        "k": True,
        "l": 0.5,
    }


def test_a_byte_order_mark_and_windows_line_ends_change_nothing():
    plain = load_experiment(write(GOOD))
    assert load_experiment(write(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())) == plain


def test_each_key_and_item_has_its_line():
    positions = load_document(write(GOOD)).positions
    assert positions["objective", "clip", "low"] == Position("spec.yaml", 18, "    low: 0.2")
    assert positions["objective", "clip"].line == 16
    assert positions["data", "evaluation", 0].line == 9


def test_a_problem_without_its_own_line_is_put_at_its_section():
    from specs.errors import Issue

    located = load_document(write(GOOD)).locate(Issue("too much", ("training", "checkpoint", "every_steps")))
    assert (located.file, located.line, located.snippet) == ("spec.yaml", 19, "training:")


def test_a_file_is_laid_over_the_one_it_extends():
    write(GOOD, "base.yaml")
    Path("sub").mkdir()
    document = load_document(write("extends: ../base.yaml\nname: child\ntraining:\n  steps: 9\n", "sub/child.yaml"))
    experiment = document.experiment
    assert (experiment.name, experiment.training.steps, experiment.training.group_size) == ("child", 9, 4)
    assert document.positions["training", "steps"] == Position("sub/child.yaml", 4, "  steps: 9")
    assert document.positions["training", "group_size"].file == "base.yaml"


def test_a_mistake_in_the_extended_file_is_told_there():
    write(changed("low: 0.2", "low: 2"), "base.yaml")
    assert message("extends: base.yaml\n").startswith("base.yaml:18: objective.clip.low: must be less than 1")


def test_a_section_of_another_type_replaces_the_extended_one():
    write(GOOD, "base.yaml")
    assert load_experiment(write("extends: base.yaml\nobjective: {type: grpo}\n")).objective.type == "grpo"
    engine = load_experiment(write("extends: base.yaml\nrollout: {engine: vllm}\n")).rollout
    assert (engine.engine, engine.max_response_length) == ("vllm", 32)


BASE_MATRIX = GOOD + "matrix:\n  product:\n    objective.kl_coef: [0.01, 0.1]\n"


def test_a_matrix_that_multiplies_with_that_of_the_extended_file_is_named_and_its_fields_can_be_taken_out() -> None:
    write(BASE_MATRIX, "base.yaml")
    own = "extends: base.yaml\nname: child\nmatrix:\n  product:\n    training.group_size: [2, 4, 8]\n"
    document = load_document(write(own))
    assert len(expand(document)) == 6
    assert (
        render(document.warnings, noun="warning")
        == """\
spec.yaml:3: matrix: the matrix of the extended file also varies fields
    3 | matrix:
  given: training.group_size here, objective.kl_coef in base.yaml: 6 cells
  hint: to vary no others, write `objective.kl_coef: null` in the same part of the matrix here
1 warning"""
    )
    alone = load_document(write(own + "    objective.kl_coef: null\n"))
    assert ([cell.values for cell in expand(alone)], alone.warnings) == (
        [{"training.group_size": size} for size in (2, 4, 8)],
        (),
    )
    assert len(expand(load_document(write("extends: base.yaml\nname: child\nmatrix: null\n")))) == 1
    assert load_document(write("extends: base.yaml\nname: child\n")).warnings == ()
    by_hand = load_document(write("extends: base.yaml\n"), ["matrix.product.training.group_size=[2, 4]"])
    assert (len(expand(by_hand)), by_hand.warnings) == (4, ())


def test_null_of_a_field_that_the_extended_file_does_not_vary_is_an_error() -> None:
    write(GOOD, "base.yaml")
    told = message("extends: base.yaml\nmatrix:\n  product:\n    objective.kl_coef: null\n")
    assert told.startswith("spec.yaml:4: matrix.product[objective.kl_coef]: must be a list")


def sections() -> list[type[Spec]]:
    """Every class of a section but for open ones, which their `type` makes one of the others."""
    found, left = [], [Spec]
    while left:
        found += (below := left.pop().__subclasses__())
        left += below
    ours = [section for section in dict.fromkeys(found) if section.__module__.startswith(("specs.", "rpg."))]
    return [section for section in ours if not is_open(section)]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_null_empties_what_may_be_empty_and_nothing_else(section: type[Spec]) -> None:
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        may_be_empty = default is None or (isinstance(default, str | list | tuple | dict) and not default)
        with pytest.raises(ValidationError) as raised:
            section.model_validate({name: None, "no such key": 1})
        at_it = any(error["loc"][:1] == (name,) for error in raised.value.errors())
        assert at_it != may_be_empty or type(None) in get_args(field.annotation), name


def test_null_takes_back_what_the_extended_file_says() -> None:
    write(GOOD + "question: Why?\nnotify: [{type: webhook, url: 'https://x.org'}]\nwarm_up: {steps: 3}\n", "base.yaml")
    emptied = load_experiment(write("extends: base.yaml\nquestion: null\nnotify: null\nwarm_up: null\n"))
    assert (emptied.question, emptied.notify, emptied.warm_up) == ("", (), None)
    assert message("extends: base.yaml\nevaluation: null\n").startswith(
        "spec.yaml:2: evaluation: must be a mapping of fields"
    )


def test_settings_win_over_the_file_and_later_ones_over_earlier():
    overrides = (
        "training.steps=5",
        "seeds=[0, 1]",
        "training.steps=6",
        "data.train.0.size=7",
        "objective.kl_coef=1e-1",
    )
    experiment = load_experiment(write(GOOD), overrides)
    assert (experiment.training.steps, experiment.seeds, experiment.data.train[0].size) == (6, (0, 1), 7)
    assert experiment.objective.kl_coef == 0.1


def test_a_setting_can_make_a_section_and_change_a_type():
    experiment = load_experiment(write(GOOD), ("warm_up.steps=3", "objective.type=dapo"))
    assert experiment.warm_up.steps == 3
    assert experiment.objective.type == "dapo"


def test_a_field_of_a_new_type_may_be_set_before_the_type():
    experiment = load_experiment(write(GOOD), ("objective.max_ratio=3", "objective.type=ppo", "objective.type=cispo"))
    assert (experiment.objective.type, experiment.objective.max_ratio) == ("cispo", 3)


def test_a_setting_of_a_matrix_path_needs_no_brackets():
    document = load_document(write(GOOD), ("matrix.product.objective.kl_coef=[0.01, 0.1]",))
    assert document.experiment.matrix.product == {"objective.kl_coef": [0.01, 0.1]}


def test_paths_are_absolute_against_the_file_that_names_them():
    Path("data").mkdir()
    write("{}\n", "data/train.jsonl")
    source = "{source: jsonl, path: train.jsonl}"
    write(changed("{source: reasoning_gym, task: chain_sum, size: 100}", source), "data/base.yaml")
    experiment = load_experiment(write("extends: data/base.yaml\n"))
    assert experiment.data.train[0].path == str(Path("data/train.jsonl").absolute())


def test_a_hub_id_stays_as_it_is_and_a_directory_becomes_absolute():
    model = "  source: scratch\n  config: {hidden_size: 32, max_position_embeddings: 64}\n"
    text = changed(model, "  source: pretrained\n  path: org/name\n")
    assert load_experiment(write(text)).model.path == "org/name"
    Path("org/name").mkdir(parents=True)
    assert "the directory contains no model" in message(text)
    Path("org/name/config.json").write_text('{"max_position_embeddings": 48}')
    assert "32 + 32 = 64 tokens    allowed: at most 48" in message(text)
    Path("org/name/config.json").write_text("{}")
    assert load_experiment(write(text)).model.path == os.path.abspath("org/name")


def test_a_frozen_document_comes_back_the_same():
    matrix = "matrix:\n  product:\n    objective: [{type: grpo}, {type: rpg}]\n    training.steps: [2, 4]\n"
    document = load_document(write(GOOD + matrix), ("seeds=[1,2]",))
    Path("spec.yaml").unlink()
    assert Document.from_json(json.loads(json.dumps(document.to_json()))) == document


def test_a_document_frozen_when_a_gpu_did_not_mean_bfloat16_stays_in_float32():
    document = load_document(write(GOOD), ("resources.device=cuda",))
    frozen = json.loads(json.dumps(document.to_json()))
    assert Document.from_json(frozen) == document
    frozen["experiment"]["training"]["precision"] = "float32"  # as it was resolved then
    earlier = Document.from_json(frozen)
    assert earlier.experiment.training.precision == "float32"
    assert [cell.experiment.training.precision for cell in expand(earlier)] == ["float32"]
    assert Document.from_json(json.loads(json.dumps(earlier.to_json()))) == earlier


def test_a_resolved_experiment_is_valid_itself():
    from specs import Experiment

    experiment = load_experiment(write(GOOD))
    assert Experiment.model_validate(json.loads(experiment.model_dump_json())) == experiment


def test_an_objective_is_parsed_from_a_mapping_with_the_same_messages():
    assert parse_objective({"type": "rpg", "clip": {"type": "none"}}).type == "rpg"
    with pytest.raises(SpecError) as caught:
        parse_objective({"type": "rpg", "clip": {"type": "dual", "low": 1.5}})
    assert str(caught.value).startswith("objective.clip.low: must be less than 1\n  given: 1.5")


def test_importing_specs_costs_nothing():
    code = (
        "import specs, sys; assert 'pydantic' not in sys.modules; specs.load_experiment; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
