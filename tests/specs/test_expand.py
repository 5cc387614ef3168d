"""matrix x seeds -> runs, and what can be wrong with a matrix."""

import pytest
from spec_text import GOOD, changed, message, warnings, write

from specs import load_document
from specs.document import expand


def cells(matrix: str, text: str = GOOD):
    return expand(load_document(write(text + matrix)))


def test_without_a_matrix_each_seed_is_a_run():
    runs = cells("seeds: [3, 4]\n")
    assert [(run.values, run.seed, run.experiment.seeds) for run in runs] == [({}, 3, (3,)), ({}, 4, (4,))]


def test_product_is_crossed_with_the_rows_of_zip_and_the_seeds():
    runs = cells(
        "seeds: [0, 1]\nmatrix:\n  product:\n    objective.kl_coef: [0.01, 0.1]\n"
        "  zip:\n    training.steps: [2, 3]\n    training.group_size: [4, 8]\n"
    )
    assert len(runs) == 8
    assert [run.values["objective.kl_coef"] for run in runs] == [0.01] * 4 + [0.1] * 4
    assert {(run.experiment.training.steps, run.experiment.training.group_size) for run in runs} == {(2, 4), (3, 8)}
    assert all(run.experiment.matrix is None and run.experiment.seeds == (run.seed,) for run in runs)


def test_excluded_combinations_are_left_out():
    runs = cells(
        "matrix:\n  product:\n    training.steps: [1, 2]\n    objective.kl_coef: [0.01, 0.1]\n"
        "  exclude:\n    - {training.steps: 1, objective.kl_coef: 0.1}\n"
    )
    assert [tuple(run.values.values()) for run in runs] == [(1, 0.01), (2, 0.01), (2, 0.1)]


def test_the_rows_of_zip_may_have_labels():
    runs = cells(
        "matrix:\n  zip:\n    training.steps: [2, 3]\n    training.group_size: [4, 8]\n"
        "  labels: [short, long]\n  product:\n    objective.kl_coef: [0.01, 0.1]\n"
        "  exclude:\n    - {training.steps: 2, objective.kl_coef: 0.01}\n"
    )
    assert [run.label for run in runs] == [
        "long, objective.kl_coef 0.01",
        "short, objective.kl_coef 0.1",
        "long, objective.kl_coef 0.1",
    ]
    assert {run.label for run in cells("seeds: [0]\n")} == {""}


def beside(rows: str, dataset: str = "held_out") -> str:
    table = f"{{source: a paper, datasets: [{dataset}], rows: {rows}}}"
    matrix = "matrix: {zip: {training.steps: [2, 3]}, labels: [short, long]}\n"
    return f"{GOOD}{matrix}evaluation: {{literature: [{table}]}}\n"


def test_figures_of_others_that_stand_beside_nothing_are_told():
    assert warnings(beside("{long: [[0.2, 0.31]]}")) == "0 warnings"
    with_more_that_varies = beside("{long: [[0.2, 0.31]]}").replace("short, long]", "short, 'long, greedy']")
    assert warnings(with_more_that_varies) == "0 warnings"
    shown = warnings(beside("{long: [[0.2, 0.31]], lung: [[0.2, 0.3]]}", "held-out"))
    assert "evaluation.literature.0.rows.lung: no row of matrix.zip has this label" in shown
    assert "allowed: short, long" in shown
    assert "evaluation.literature.0.datasets.0: no evaluation set has this name" in shown
    for row in ("[[0.2]]", "[[0.2, 30]]", "[[0.2, 0.3], [0.1, 0.2]]", "[]"):
        told = message(beside(f"{{long: {row}}}"))
        assert "long needs [last, best], shares between 0 and 1, for each of the datasets" in told


def test_figures_of_others_are_in_no_fingerprint():
    with_figures = cells("", beside("{long: [[0.2, 0.31]]}"))
    without = cells("", beside("{long: [[0.2, 0.31]]}").partition("evaluation: {lit")[0])
    identities = [[run.experiment.evaluation.identity() for run in runs] for runs in (with_figures, without)]
    assert identities[0] == identities[1]


def test_a_section_that_only_the_matrix_gives_need_not_be_said_twice():
    start, end = GOOD.index("objective:"), GOOD.index("training:")
    runs = cells("matrix:\n  product:\n    objective: [{type: grpo}, {type: rloo}]\n", GOOD[:start] + GOOD[end:])
    assert [run.experiment.objective.type for run in runs] == ["grpo", "rloo"]


def test_published_settings_follow_the_objective_of_the_cell():
    runs = cells("matrix:\n  product:\n    objective.type: [rpg, grpo, dr_grpo]\n")
    assert [run.experiment.advantage.scale for run in runs] == ["none", "group_std", "none"]
    assert runs[0].experiment.objective.clip.low == 0.2


def test_what_is_written_holds_in_every_cell_whose_objective_has_the_key():
    spec = GOOD.replace("kl_coef: 1e-2", "kl_coef: 0.03\n  divergence: forward")
    runs = cells("matrix:\n  product:\n    objective.type: [rpg, grpo, cispo]\n", spec.replace("low: 0.2", "low: 0.15"))
    assert [run.experiment.objective.kl_coef for run in runs] == [0.03] * 3
    assert [run.experiment.objective.clip.low for run in runs[:2]] == [0.15] * 2
    assert runs[0].experiment.objective.divergence == "forward"


def test_a_clip_of_another_type_keeps_the_margins_that_are_written():
    spec = GOOD.replace("low: 0.2", "low: 0.15\n    dual: 5")
    runs = cells("matrix:\n  product:\n    objective.clip.type: [dual, truncate, none]\n", spec)
    assert [run.experiment.objective.clip.model_dump().get("low") for run in runs] == [0.15, 0.15, None]


def test_a_key_that_no_objective_has_is_named_in_a_matrix_of_objectives_too():
    said = message(GOOD.replace("kl_coef: 1e-2", "kl_cof: 1e-2") + "matrix: {product: {objective.type: [grpo, rpg]}}\n")
    assert "objective.kl_cof: unknown field" in said


def test_settings_that_differ_as_published_are_warned_of_until_they_are_written():
    matrix = "matrix:\n  product:\n    objective.type: [rpg, grpo]\n"
    (warning,) = load_document(write(GOOD + matrix)).warnings
    assert (warning.path, warning.line) == (("matrix", "product", "objective.type"), 26)
    assert warning.given == (
        "objective.clip.high 0.28 (rpg), 0.2 (grpo); objective.clip.dual 10 (rpg), 0 (grpo); "
        "objective.aggregation token_mean (rpg), sequence_mean (grpo); "
        "advantage.scale none (rpg), group_std (grpo); reference.source behaviour (rpg), initial (grpo)"
    )
    written = GOOD.replace("low: 0.2", "low: 0.2\n    high: 0.28\n    dual: 10\n  aggregation: token_mean")
    written += "advantage: {scale: none}\nreference: {source: initial}\n"
    assert not load_document(write(written + matrix)).warnings


def test_rows_that_write_whole_objectives_are_warned_of_what_one_of_them_leaves_out():
    rows = "matrix: {zip: {objective: [{type: rpg, kl_coef: 0.01}, {type: grpo}]}}\n"
    (warning,) = load_document(write(GOOD + rows)).warnings
    assert warning.given.startswith("objective.kl_coef 0.01 (rpg), 0.04 (grpo); ")


def test_a_type_is_set_before_the_fields_that_vary_with_it():
    runs = cells("matrix:\n  product:\n    objective.kl_coef: [0.02]\n    objective.type: [grpo]\n")
    assert (runs[0].experiment.objective.type, runs[0].experiment.objective.kl_coef) == ("grpo", 0.02)


def test_a_value_that_cannot_be_is_told_at_its_line_of_the_matrix():
    said = message(GOOD + "matrix:\n  product:\n    objective.clip.low:\n      - 0.2\n      - 1.5\n")
    assert said.startswith("spec.yaml:28: objective.clip.low: must be less than 1\n    28 |       - 1.5\n")


def test_another_clip_takes_the_place_of_a_whole_clip():
    under = write(changed("low: 0.2", "low: 0.3"), "under.yaml")
    assert load_document(under, ("objective.clip.type=none",)).experiment.objective.clip.model_dump() == {
        "type": "none"
    }
    over = write("extends: under.yaml\nobjective: {clip: {type: truncate, high: 0.5}}\n", "over.yaml")
    assert load_document(over).experiment.objective.clip.model_dump() == {"type": "truncate", "low": 0.2, "high": 0.5}


def test_a_list_where_a_section_belongs_is_told_at_its_line():
    said = message(GOOD + "matrix:\n  zip: {objective: [[1]]}\n  product: {objective.kl_coef: [0.5]}\n")
    assert said.startswith("spec.yaml:25: objective.type: missing\n")


def test_a_clash_between_fields_is_told_at_the_value_that_brings_it():
    matrix = "matrix:\n  product:\n    training.group_size: [4, 5]\n    training.steps: [1, 2]\n"
    assert message(changed("prompts_per_step: 4", "prompts_per_step: 1") + matrix).startswith(
        "spec.yaml:26: training.minibatches: the batch does not divide evenly (in the run with training.group_size=5)\n"
        "    26 |     training.group_size: [4, 5]\n"
        "  given: 1 x 5 responses in 2 parts    allowed: 1, 5\n"
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        ("product: {objective.kl_cof: [1]}", "matrix.product[objective.kl_cof]: unknown field"),
        ("product: {seeds: [[1], [2]]}", "matrix.product.seeds: `seeds` cannot vary"),
        ("product: {data.train.1.size: [5]}", "matrix.product[data.train.1.size]: no such item"),
        ("product: {training.steps: []}", "matrix.product[training.steps]: must have at least 1 item"),
        ("product: {training.steps: [1, 2, 1]}", "matrix.product[training.steps].2: the value is given twice"),
        (
            "{product: {training.steps: [1]}, zip: {training.steps: [2]}}",
            "matrix.zip[training.steps]: varies in product",
        ),
        ("zip: {training.steps: [1, 2], training.epochs: [1]}", "matrix.zip: lists of unequal length"),
        ("{zip: {training.steps: [1, 2]}, labels: [a]}", "matrix.labels: not one label for each row"),
        ("{product: {training.steps: [1, 2]}, labels: [a, b]}", "matrix.labels: not one label for each row"),
        ("{zip: {training.steps: [1, 2]}, labels: [a, a]}", "matrix.labels.1: the label is given twice"),
        ("{zip: {training.steps: [1, 2]}, labels: [a, ' ']}", "matrix.labels.1: the label is empty"),
        (
            "zip: {training.steps: [1, 1], training.epochs: [2, 2]}",
            "matrix.zip[training.steps].1: the row is given twice",
        ),
        (
            "{product: {training.steps: [1]}, exclude: [{training.steps: 1}]}",
            "matrix.exclude: every combination is excluded",
        ),
        (
            "{product: {training.steps: [1]}, exclude: [{training.steps: 2}]}",
            "matrix.exclude.0[training.steps]: excludes nothing",
        ),
        (
            "{product: {training.steps: [1]}, exclude: [{training.epochs: 2}]}",
            "matrix.exclude.0[training.epochs]: does not vary",
        ),
        ("{product: {training.steps: [1]}, exclude: [{}]}", "matrix.exclude.0: excludes everything"),
    ],
)
def test_what_a_matrix_may_not_say(matrix, said):
    text = f"matrix: {matrix}\n" if matrix.startswith("{") else f"matrix:\n  {matrix}\n"
    assert said in message(GOOD + text)


def test_too_many_runs_are_refused():
    axes = "".join(f"    training.{name}: [{', '.join(map(str, range(1, 40)))}]\n" for name in ("steps", "epochs"))
    assert "matrix: too many runs" in message(GOOD + f"seeds: [0, 1, 2]\nmatrix:\n  product:\n{axes}")


def test_seeds_are_given_once():
    assert "seeds.1: the seed is given twice" in message(GOOD + "seeds: [1, 1]\n")
    assert "seeds.0: must be at least 0" in message(GOOD + "seeds: [-1]\n")


def test_the_base_need_not_be_possible_where_the_matrix_varies_it():
    runs = cells("matrix:\n  product:\n    training.minibatches: [1, 4]\n", changed("minibatches: 2", "minibatches: 3"))
    assert [run.experiment.training.minibatches for run in runs] == [1, 4]
