"""Problems whose answer is any expression that passes tests."""

import pytest

from rpg.rewards import Problem, Reward, open_scorer
from specs.schema.data import Source

SOURCE = {"source": "expressions", "size": 40, "seed": 3}


def test_the_same_seed_makes_the_same_problems() -> None:
    problems, again = (list(Source.model_validate(SOURCE).read()) for _ in range(2))
    assert problems == again
    assert problems != list(Source.model_validate({**SOURCE, "seed": 4}).read())
    slope, offset = map(int, problems[0].answer.split("*n+"))
    assert problems[0].prompt == f"1:{slope + offset} 2:{2 * slope + offset} ="


@pytest.mark.needs("bubblewrap")
def test_an_expression_is_right_where_its_values_are() -> None:
    reward = Reward.model_validate({"type": "code", "extract": "whole", "frame": "def f(n): return {code}"})
    problems = [
        Problem(str(index), str(each.prompt), each.answer, each.dataset, each.metadata)
        for index, each in enumerate(Source.model_validate(SOURCE).read())
    ]
    slope, offset = map(int, problems[0].answer.split("*n+"))
    with open_scorer(reward) as scorer:
        assert all(score.correct for score in scorer.score(problems, [each.answer for each in problems]))
        others = [f"{offset}+n*{slope}", f"{slope}*n", f"{slope}*n+", f"[0,{slope + offset},{2 * slope + offset}][n]"]
        scores = scorer.score([problems[0]] * len(others), others)
    assert [score.value for score in scores] == [1.0, float(offset == 0), 0.0, 0.0]
