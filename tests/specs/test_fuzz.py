"""Whatever the file holds, the answer is an experiment or a SpecError that can be printed."""

import json
import os
import shutil
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT
from spec_text import GOOD

from specs.errors import SpecError, render
from specs.loader import load_any

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LINES = GOOD.splitlines()
SCALARS = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.sampled_from(
        [
            *["type", "rpg", "*a", "&a x", "!!int 3", "[", "}", "{a: b}", "[1, [2]]", ".nan", "-1", "1e999", "''"],
            *["{schedule: [[1, 0.1], [9, 0.3]], between: linear}", "{schedule: [[1]]}", "{schedule: 3}"],
        ]
    ),
)


def loads_or_is_refused(data: bytes, *overrides: str) -> None:
    Path("spec.yaml").write_bytes(data)
    try:
        load_any("spec.yaml", overrides)
    except SpecError as error:
        render(error.issues).encode()


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes(data):
    loads_or_is_refused(data)


@QUICK
@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@,? \n\r\u2028\t0.~\\", max_size=60))
def test_any_yaml_like_text(text):
    loads_or_is_refused(text.encode())


@QUICK
@given(st.integers(0, len(LINES) - 1), SCALARS)
def test_a_value_replaced(index, value):
    key, _, _ = LINES[index].partition(":")
    lines = [*LINES[:index], f"{key}: {value}", *LINES[index + 1 :]]
    loads_or_is_refused("\n".join(lines).encode("utf-8", "replace"))


@QUICK
@given(st.lists(st.integers(0, len(LINES) - 1), max_size=6), st.integers(0, 3))
def test_lines_dropped_and_indented(dropped, indent):
    lines = [" " * (indent if index % 5 == 0 else 0) + line for index, line in enumerate(LINES) if index not in dropped]
    loads_or_is_refused("\n".join(lines).encode())


PATHS = [
    "training.steps",
    "seeds",
    "matrix",
    "objective",
    "objective.clip",
    "objective.clip.low",
    "objective.clip.low.schedule.0.1",
    "data.train.0",
    "data",
    "name",
    "warm_up.steps",
]


@QUICK
@given(st.sampled_from(PATHS) | st.text(max_size=10), SCALARS | st.recursive(st.integers(), st.lists, max_leaves=4))
def test_any_setting(path, value):
    loads_or_is_refused(GOOD.encode(), f"{path}={value}")


KEYS = st.sampled_from(
    [
        "objective.kl_coef",
        "objective.kl_coef.schedule.0.1",
        "objective.clip.low.schedule.0",
        "training.steps",
        "objective",
        "seeds",
        "data.train.0.size",
        "a",
        "",
        "model.path",
    ]
)
AXES = st.dictionaries(
    KEYS,
    st.lists(st.sampled_from([1, 0.5, "x", None, [1], {"type": "grpo"}, {"schedule": [[1, 0.5]]}]), max_size=3),
    max_size=3,
)


@QUICK
@given(AXES, AXES, st.lists(st.dictionaries(KEYS, st.integers(), max_size=2), max_size=2))
def test_any_matrix(product, rows, exclude):
    matrix = json.dumps({"product": product, "zip": rows, "exclude": exclude})
    loads_or_is_refused(f"{GOOD}matrix: {matrix}\n".encode())


STUDY = """\
name: fuzzed
experiment: base.yaml
overrides: {training.steps: 9, seeds: [0, 1]}
parameters:
  objective.clip.low: {float: [0.1, 0.4], step: 0.1}
  reference: {cases: {moves: {source: snapshot, update: {every_steps: 2}}, stays: {source: initial}}}
  reference.update.every_steps: {int: [2, 4], when: {reference: moves}}
goal: {dataset: held_out, metric: mean@8}
constraints: [{metric: kl/reverse, max: 0.1}]
sampler: {type: tpe}
pruner: {type: asha, rungs: [3, 6], eta: 2}
budget: {hours: 2}
confirm: {candidates: 2}
warm_start: {studies: [earlier]}
trials: 8
"""
STUDY_LINES = STUDY.splitlines()
VALUES = st.sampled_from([0, 1, 0.1, 0.3, 1e300, -1, 2**60, True, None, "", "moves", "dual", [1], {}, {"type": "grpo"}])
SEARCHED = [
    "objective.clip.low",
    "training.epochs",
    "reference",
    "objective",
    "objective.clip",
    "data.train.0.size",
    "x",
    "",
]
CONDITIONS = st.dictionaries(st.sampled_from(SEARCHED), VALUES | st.lists(VALUES, max_size=2), max_size=2)
RANGES = st.one_of(
    st.fixed_dictionaries(
        {"float": st.lists(VALUES, min_size=2, max_size=2)},
        optional={"step": VALUES, "log": VALUES, "when": CONDITIONS},
    ),
    st.fixed_dictionaries(
        {"int": st.lists(VALUES, min_size=2, max_size=2)}, optional={"step": VALUES, "log": VALUES, "when": CONDITIONS}
    ),
    st.fixed_dictionaries({"choice": st.lists(VALUES, max_size=4)}, optional={"when": CONDITIONS}),
    st.fixed_dictionaries(
        {"cases": st.dictionaries(st.text(max_size=3), VALUES, max_size=3)}, optional={"when": CONDITIONS}
    ),
    VALUES,
)


def study_loads_or_is_refused(text: str, *overrides: str) -> None:
    Path("base.yaml").write_text(GOOD)
    loads_or_is_refused(text.encode("utf-8", "replace"), *overrides)


@QUICK
@given(st.integers(0, len(STUDY_LINES) - 1), SCALARS | RANGES.map(json.dumps))
def test_a_value_of_a_study_replaced(index, value):
    key, _, _ = STUDY_LINES[index].partition(":")
    study_loads_or_is_refused("\n".join([*STUDY_LINES[:index], f"{key}: {value}", *STUDY_LINES[index + 1 :]]))


@QUICK
@given(st.dictionaries(st.sampled_from(SEARCHED), RANGES, max_size=4), st.sampled_from(["tpe", "grid", "cma"]))
def test_any_search_space(parameters, sampler):
    study_loads_or_is_refused(
        f"name: a\nexperiment: base.yaml\nparameters: {json.dumps(parameters)}\ngoal: {{dataset: held_out}}\n"
        f"sampler: {{type: {sampler}}}\ntrials: 9\n"
    )


@QUICK
@given(
    st.sampled_from(["parameters.objective.clip.low", "goals", "goal.metric", "pruner", "sampler.type", "overrides.x"]),
    SCALARS | RANGES.map(json.dumps),
)
def test_any_setting_of_a_study(path, value):
    study_loads_or_is_refused(STUDY, f"{path}={value}")


SHIPPED = ROOT / "specs"
NAMES = sorted(str(path.relative_to(SHIPPED)) for path in SHIPPED.rglob("*.yaml"))
TEXTS = {name: (SHIPPED / name).read_text().splitlines() for name in NAMES}
WORDS = sorted({word.strip(",:{}[]") for lines in TEXTS.values() for line in lines for word in line.split()})
SECONDS = float(os.environ.get("RPG_FUZZ_SECONDS", "3"))
"""How long shipped specs are changed at random; `.ci/run` takes longer."""


@st.composite
def mutated(draw) -> tuple[str, str]:
    """A shipped spec with some of its lines changed: its name, and its text."""
    name = draw(st.sampled_from(NAMES))
    lines = list(TEXTS[name])
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(lines) - 1))
        line, other = lines[index], draw(st.sampled_from(TEXTS[draw(st.sampled_from(NAMES))]))
        change = draw(st.sampled_from(["drop", "double", "swap", "indent", "word", "value", "characters", "cut"]))
        if change == "drop" and len(lines) > 1:
            del lines[index]
        elif change == "double":
            lines.insert(index, line)
        elif change == "swap":
            lines[index] = other
        elif change == "indent":
            lines[index] = " " * draw(st.integers(0, 6)) + line.lstrip()
        elif change == "word":
            words = line.split(" ")
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(WORDS))
            lines[index] = " ".join(words)
        elif change == "value":
            lines[index] = f"{line.partition(':')[0]}: {draw(SCALARS)}"
        elif change == "characters":
            place = draw(st.integers(0, len(line)))
            lines[index] = line[:place] + draw(st.text(max_size=3)) + line[place:]
        else:
            lines[index] = line[: draw(st.integers(0, len(line)))]
    return name, "\n".join(lines)


def test_shipped_specs_with_lines_changed_at_random(tmp_path, monkeypatch):
    shutil.copytree(SHIPPED, tmp_path / "specs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tried = 0

    @settings(QUICK, max_examples=25, derandomize=False, database=None)
    @given(mutated())
    def refused_or_loaded(changed):
        nonlocal tried
        name, text = changed
        # Beside the shipped spec, so that the paths it names exist.
        monkeypatch.chdir((tmp_path / "specs" / name).parent)
        loads_or_is_refused(text.encode("utf-8", "replace"))
        tried += 1

    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        refused_or_loaded()
    print(f"{tried} changed specs")
