"""Whatever the file holds, the answer is an experiment or a SpecError that can be printed."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_text import GOOD

from specs.errors import SpecError, render
from specs.loader import load_either

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
        load_either("spec.yaml", overrides)
    except SpecError as error:
        render(error.issues).encode()


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes(data):
    loads_or_is_refused(data)


@QUICK
@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@,? \n\t0.~", max_size=60))
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
    import json

    matrix = json.dumps({"product": product, "zip": rows, "exclude": exclude})
    loads_or_is_refused(f"{GOOD}matrix: {matrix}\n".encode())
