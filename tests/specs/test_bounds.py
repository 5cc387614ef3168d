"""Whatever a file says, it is answered soon: what takes long is beyond a bound, and the answer names it."""

import os
import resource
import time
from pathlib import Path

import pytest
from spec_text import GOOD, changed, message, write

from specs.bounds import MAX_ISSUES, comparable, repeats
from specs.errors import SpecError, render
from specs.loader import load_any
from specs.schema.study import IntRange
from specs.study_space import combinations, num_combinations

CPU_SECONDS = 3.0
"""A file is answered within two on an idle machine; those below took from ten to forever."""


def many(number: int, text: str) -> str:
    """The text so often, each `#` a number."""
    return ",".join(text.replace("#", str(index)) for index in range(number))


def axis(path: str, number: int) -> str:
    return f"    {path}: [{', '.join(f'{0.01 + index * 1e-4:.4f}' for index in range(number))}]\n"


def study(parameters: str, sampler: str = "random") -> str:
    Path("base.yaml").write_text(GOOD)
    return (
        f"name: a\nexperiment: base.yaml\nparameters:\n{parameters}goal: {{dataset: held_out}}\n"
        f"sampler: {{type: {sampler}}}\ntrials: 8\n"
    )


def evaluation(models: int, sampling: int, name: str = "org/m#") -> str:
    listed = many(models, f"{{source: pretrained, path: {name}, name: n#}}")
    settings = many(sampling, "{name: s#, temperature: 0.#}")
    return (
        f"name: ev\nmodels: [{listed}]\nsampling: [{settings}]\nreward: {{type: exact_match}}\ndata:\n  evaluation:\n"
        "    - {name: held_out, source: reasoning_gym, task: chain_sum, size: 50, seed: 1000}\n"
    )


def sources(number: int) -> str:
    held_out = "".join(
        f"    - {{name: h{index}, source: reasoning_gym, task: chain_sum, size: 1, seed: 2}}\n"
        for index in range(number)
    )
    trained = "    - {source: reasoning_gym, task: chain_sum, size: 1}\n" * number
    text = changed("  max_prompt_length: 32\n", f"{held_out}  max_prompt_length: 32\n")
    return text.replace("  evaluation:\n", f"{trained}  evaluation:\n", 1)


AXES = ("objective.kl_coef", "objective.clip.low", "objective.clip.high", "training.optimizer.learning_rate")
ANSWERS = {
    "a number of 100,000 hexadecimal digits": (
        lambda: changed("steps: 4", f"steps: 0x{'f' * 100_000}"),
        "a number of too many digits",
    ),
    "four lines of a matrix": (
        lambda: GOOD + "matrix:\n  product:\n" + "".join(axis(path, 60) for path in AXES),
        "matrix: too many runs\n    24 | matrix:\n  given: 60 x 60 x 60 x 60 combinations",
    ),
    "a matrix of which most is excluded": (
        lambda: (
            f"{GOOD}matrix:\n  product:\n{axis(AXES[0], 200)}{axis(AXES[1], 200)}  exclude: "
            f"[{many(199, '{objective.kl_coef: 0.01#}')}]\n"
        ),
        "given: 200 x 200 combinations    allowed: at most 4096, before exclude",
    ),
    "many entries of exclude": (
        lambda: (
            f"{GOOD}matrix:\n  product:\n{axis(AXES[0], 2000)}  exclude: [{many(1900, '{objective.kl_coef: 0.01#}')}]\n"
        ),
        "matrix.exclude: too many entries",
    ),
    "as many cells as a matrix may have": (
        lambda: f"{GOOD}matrix:\n  product:\n{axis(AXES[0], 4096)}",
        "given: 4096 cells, each with the 35 values of the spec    allowed: at most 65536 values in all cells",
    ),
    "labels": (
        lambda: (
            f"{GOOD}matrix: {{zip: {{objective.kl_coef: [{many(1200, '0.01#')}]}}, labels: [{many(1200, 'l#')}]}}\n"
        ),
        "",
    ),
    "unknown keys": (lambda: GOOD + many(9900, "key#: 1\n").replace(",", ""), f"{MAX_ISSUES + 1} errors"),
    "25,000 unknown keys": (lambda: GOOD + "".join(f"q{n}:\n" for n in range(25_000)), "too many values"),
    "a key given often": (
        lambda: GOOD + "name: a\n" * 25_000,
        f"there are more problems than these {MAX_ISSUES} problems",
    ),
    "40,000 seeds": (lambda: f"{GOOD}seeds: [{many(40_000, '#')}]\n", "too many values"),
    "9,000 seeds": (lambda: f"{GOOD}seeds: [{many(9000, '#')}]\n", "seeds: too many runs"),
    "9,000 wrong seeds": (lambda: f"{GOOD}seeds: [{many(9000, 'a')}]\n", f"{MAX_ISSUES + 1} errors"),
    "sinks": (lambda: f"{GOOD}sinks: [{many(4500, '{type: tensorboard}')}]\n", "fix these first"),
    "sets named twice": (lambda: f"{GOOD}evaluation: {{datasets: [{many(9000, 'held_out')}]}}\n", "fix these first"),
    "sets": (lambda: sources(700), ""),
    "a schedule of many points": (
        lambda: changed("kl_coef: 1e-2", f"kl_coef: {{schedule: [{many(3000, '[#, 0.1]')}]}}"),
        "",
    ),
    "a reference that moves after training": (
        lambda: (
            changed("steps: 4", "steps: 1000000000")
            + "reference: {source: snapshot, update: {every_steps: 2000000000}}\n"
        ),
        "the reference is never updated",
    ),
    "a question as long as the file may be": (lambda: f"{GOOD}question: {'x ' * 100_000}\n", ""),
    "a long key": (lambda: f"{GOOD}{'x' * 200_000}: 1\n", "a space is missing after the colon"),
    "a setting of many candidates": (
        lambda: study(f"  objective.kl_coef: {{choice: [{many(5000, '0.01#1')}]}}\n"),
        "parameters[objective.kl_coef]: too many candidates\n",
    ),
    "candidates": (lambda: study(f"  objective.kl_coef: {{choice: [{many(500, '0.01#1')}]}}\n"), ""),
    "candidates of which none is possible": (
        lambda: study(f"  objective.kl_coef: {{choice: [{many(500, '-1#')}]}}\n"),
        "fix these first",
    ),
    "many parameters": (
        lambda: study("".join(f"  model.config.k{n}: {{int: [1, 9]}}\n" for n in range(2000))),
        "too many parameters\n    3 | parameters:\n  given: 2000    allowed: at most 32",
    ),
    "a grid of billions": (
        lambda: study(
            "  objective.clip.low: {float: [0.1, 0.4], step: 1.0e-9}\n  training.group_size: {int: [2, 8192]}\n", "grid"
        ),
        "",
    ),
    "conditions on many parameters": (
        lambda: study(
            "".join(f"  model.config.k{n}: {{int: [1, 9]}}\n" for n in range(14))
            + f"  model.config.z: {{int: [1, 9], when: {{{many(14, 'model.config.k#: [1, 2, 3, 4, 5, 6, 7]')}}}}}\n",
            "grid",
        ),
        "",
    ),
    "models": (lambda: evaluation(1600, 0), ""),
    "models that are one": (lambda: evaluation(1600, 0, "org/m"), "the same weights as n0"),
    "models and settings": (lambda: evaluation(300, 9), ""),
    "more models and settings than runs": (lambda: evaluation(900, 900), "models: too many runs"),
}


@pytest.mark.more
@pytest.mark.parametrize("case", ANSWERS)
def test_a_file_of_any_content_is_answered_soon(case):
    make, said = ANSWERS[case]
    path = write(make())
    began = time.process_time()
    try:
        text = render(load_any(path).warnings, noun="warning")
    except SpecError as error:
        text = render(error.issues)
    seconds = time.process_time() - began
    assert said in text
    assert len(text) < 100_000
    assert seconds < CPU_SECONDS, text[:200]


@pytest.mark.parametrize("place", ["/dev/zero", "pipe"])
def test_no_path_of_a_file_leads_into_a_device_or_a_pipe(place):
    os.mkfifo("pipe")
    path = os.path.abspath(place)
    Path("model").mkdir()
    Path("model/config.json").symlink_to(path)
    texts = [
        f"extends: {path}\n",
        study("  objective.kl_coef: {float: [0.01, 0.2]}\n").replace("base.yaml", path),
        changed("source: reasoning_gym, task: chain_sum, size: 100", f"source: jsonl, path: {path}"),
        changed(
            "source: scratch\n  config: {hidden_size: 32, max_position_embeddings: 64}",
            "source: pretrained\n  path: ./model",
        ),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in texts:
        assert path in (said := message(text)) or "no model" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"


def test_what_is_told_of_one_file_is_what_somebody_may_read():
    said = message(GOOD + "".join(f"key{n}: 1\n" for n in range(150)))
    assert said.count("unknown field") == MAX_ISSUES
    assert said.endswith(
        "spec.yaml: there are more problems than these 100 problems\n"
        "  hint: fix these first\n101 errors; nothing was run"
    )


def test_values_that_python_holds_for_equal_are_repeats():
    values = [1, True, 1.0, "1", [1], (1,), {"a": [1]}, {"a": [True]}, None, None]
    assert list(repeats(values)) == [
        index
        for index, value in enumerate(values)
        if any(comparable(value) == comparable(one) for one in values[:index])
    ]
    assert list(repeats(values)) == [1, 2, 5, 7, 9]


def test_the_combinations_of_conditional_parameters_are_counted_as_they_are_listed():
    space = {
        "a": IntRange(int=(1, 4)),
        "b": IntRange(int=(1, 3), when={"a": [1, 2]}),
        "c": IntRange(int=(1, 5), when={"a": [2, 3], "b": [1, 3]}),
        "d": IntRange(int=(1, 2), when={"c": [5], "a": [2]}),
        "e": IntRange(int=(1, 2), when={"b": [2]}),
    }
    assert num_combinations(space) == len(list(combinations(space)))
