"""How prompts are dealt to the ranks that sample them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg.rollouts.dealing import SeenLengths
from tests.rpg.learner_worker import responses


def seen(*tokens: float) -> SeenLengths:
    import torch

    lengths = SeenLengths(len(tokens))
    lengths.restore(torch.tensor(tokens))
    return lengths


def test_neighbours_stay_together_until_a_length_is_known() -> None:
    shares = SeenLengths(10).deal([4, 5, 6, 7, 8], [1, 1])
    assert [share.tolist() for share in shares] == [[0, 1, 2], [3, 4]]


def test_a_rank_with_long_responses_gets_fewer_prompts_and_an_unknown_problem_counts_as_the_mean() -> None:
    shares = seen(100, 10, 10, 0, 10, 10).deal([1, 0, 2, 3, 4, 5], [1, 1])
    assert [share.tolist() for share in shares] == [[1], [0, 2, 3, 4, 5]], "100 against 28 + 4 x 10"


def test_a_rank_gets_prompts_for_each_of_its_engines_the_longest_first_and_one_without_engines_gets_none() -> None:
    shares = SeenLengths(10).deal(range(7), [2, 0, 1])
    assert [share.tolist() for share in shares] == [[0, 1, 2, 3, 4], [], [5, 6]]
    shares = seen(10, 20, 10, 40, 30, 10).deal(range(6), [2, 0, 1])
    assert [share.tolist() for share in shares] == [[3, 1, 0, 5], [], [2, 4]], "80 over two, 40 over one"


def test_the_length_of_a_problem_is_the_mean_of_its_last_group() -> None:
    step = responses()
    lengths = SeenLengths(9)
    lengths.note(step)
    means = [float(step.lengths[step.group_ids == group].mean()) for group in range(5)]
    assert lengths.state()[step.problems[-1]] == np.float32(means[-1])
    again = SeenLengths(9)
    again.restore(lengths.state())
    assert again.state().tolist() == lengths.state().tolist()


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 2000), min_size=8, max_size=60), ranks=st.integers(1, 8))
def test_every_prompt_is_dealt_once_and_no_rank_has_more_than_a_response_above_another(
    tokens: list[int], ranks: int
) -> None:
    shares = seen(*map(float, tokens)).deal(range(len(tokens)), [1] * ranks)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(tokens)))
    if any(tokens):
        mean = np.mean([count for count in tokens if count])
        loads = [sum(tokens[place] or mean for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(tokens) + 1e-2
