"""The distribution of responses over ranks, and the places of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg.batches.batch import StepRollouts, collate, join, microbatch, select
from rpg.batches.minibatches import cut, plan_step
from rpg.batches.packing_plan import IDLE, Rows, _fill_packed, plan_packed, plan_padded
from rpg.rewards.score import Score
from rpg.types import Rollout, RolloutGroup, Turn
from specs.schema.training import Training


def example() -> StepRollouts:
    """Two prompts, two responses each, all of another length; a token's id is its place."""
    responses = [((3, 4, 5), "stop"), ((6,), "length"), ((11, 12), "stop"), ((13,), "stop")]
    rollouts = [Rollout((Turn(ids, tuple(-token / 10 for token in ids)),), reason) for ids, reason in responses]
    groups = [
        RolloutGroup((1, 2), tuple(rollouts[:2]), policy_version=7),
        RolloutGroup((10,), tuple(rollouts[2:]), policy_version=7),
    ]
    scores = [Score(value=float(value), correct=False) for value in range(4)]
    return collate(groups, problems=[5, 9], responses=["a", "b", "c", "d"], scores=scores)


@settings(deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    group_size=st.integers(1, 6),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 160),
    packed=st.booleans(),
    data=st.data(),
)
def test_every_response_is_trained_on_once_by_one_rank(
    prompts: list[int], group_size: int, ranks: int, max_tokens: int, packed: bool, data: st.DataObject
) -> None:
    count = len(prompts) * group_size
    responses = np.array(data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)))
    groups = np.repeat(np.arange(len(prompts)), group_size)
    heads = np.array(prompts)[groups]
    plans = (
        plan_packed(heads, responses, groups, range(count), ranks=ranks, max_tokens=max_tokens)
        if packed
        else plan_padded(heads + responses, range(count), ranks=ranks, max_tokens=max_tokens)
    )
    counted = [index for plan in plans for rows in plan for index in rows.rollouts]
    assert sorted(counted) == list(range(count))
    assert len({len(plan) for plan in plans}) == 1, "every rank makes the same number of passes"
    for rows in (rows for plan in plans for rows in plan if rows.counts):
        index = list(rows.rollouts)
        runs = [group for group, before in zip(groups[index], [-1, *groups[index]], strict=False) if group != before]
        assert not packed or len(runs) == len(set(runs)), "a row has a prompt once"
        lengths = (heads + responses)[index]
        tokens = responses[index].sum() + sum(prompts[group] for group in runs)
        assert len(index) == 1 or (tokens if packed else len(index) * lengths.max()) <= max_tokens


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=8, max_size=40))
def test_the_ranks_shares_differ_by_at_most_one_response(lengths: list[int]) -> None:
    array = np.array(lengths)
    loads = [
        sum(int(array[list(rows.rollouts)].sum()) for rows in plan if rows.counts)
        for plan in plan_padded(array, range(len(lengths)), ranks=2, max_tokens=10)
    ]
    assert abs(loads[0] - loads[1]) <= max(lengths)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=8, max_size=40), packed=st.booleans())
def test_where_attention_costs_what_its_pairs_do_long_responses_weigh_more(lengths: list[int], packed: bool) -> None:
    array, zeros = np.array(lengths), np.zeros(len(lengths), dtype=np.int64)
    everything, groups = range(len(lengths)), np.arange(len(lengths))
    plans = (
        plan_packed(zeros, array, groups, everything, ranks=2, max_tokens=10, attention=0.1)
        if packed
        else plan_padded(array, everything, ranks=2, max_tokens=10, attention=0.1)
    )
    shares = [array[[index for rows in plan for index in rows.rollouts]] for plan in plans]
    one, two = (float((share + 0.1 * share**2).sum()) for share in shares)
    assert abs(one - two) <= max(lengths) + 0.1 * max(lengths) ** 2 + 1e-6
    assert sum(map(len, shares)) == len(lengths)


def test_the_pairs_of_one_long_response_weigh_as_ten_short_ones() -> None:
    lengths = np.array([40, *[10] * 10])
    shares = [
        sorted(sum(len(rows.rollouts) for rows in plan) for plan in plans)
        for plans in (
            plan_padded(lengths, range(11), ranks=2, max_tokens=10, attention=attention) for attention in (0.0, 0.1)
        )
    ]
    assert shares == [[4, 7], [1, 10]], "40 + 160 is ten times 10 + 10"


def shares_of_two(responses: list[int], group_size: int) -> list[list[int]]:
    """The responses that each of two ranks gets of groups with prompts of 10 tokens."""
    array = np.array(responses)
    groups = np.arange(len(array)) // group_size
    heads = np.full(len(array), 10)
    return [
        sorted(index for rows in plan for index in rows.rollouts)
        for plan in plan_packed(heads, array, groups, range(len(array)), ranks=2, max_tokens=60)
    ]


def test_a_group_stays_on_one_rank_unless_another_would_wait_for_it() -> None:
    assert shares_of_two([5, 9, 8, 6], group_size=2) == [[0, 1], [2, 3]]
    assert shares_of_two([200, 190, 5, 5], group_size=2) == [[0, 3], [1, 2]]


def test_a_long_prompt_is_not_put_before_more_responses_than_memory_has_its_keys_for() -> None:
    count = 30
    heads, ones, groups = np.full(count, 100), np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    [plan] = plan_packed(heads, ones, groups, range(count), ranks=1, max_tokens=130)
    assert [len(rows.rollouts) for rows in plan] == [5] * 6, "4 x 130 tokens hold 5 x 101"


@settings(deadline=None)
@given(count=st.integers(1, 60), length=st.integers(1, 40), room=st.integers(1, 9), packed=st.booleans())
def test_passes_are_the_fewest_and_alike(count: int, length: int, room: int, packed: bool) -> None:
    lengths, zeros = np.full(count, length), np.zeros(count, dtype=np.int64)
    [plan] = (
        plan_packed(zeros, lengths, np.arange(count), range(count), ranks=1, max_tokens=room * length)
        if packed
        else plan_padded(lengths, range(count), ranks=1, max_tokens=room * length)
    )
    fewest = -(-count // room)
    assert len(plan) == fewest
    assert max(len(rows.rollouts) for rows in plan) == -(-count // fewest)


@settings(deadline=None)
@given(prompts=st.lists(st.integers(50, 8000), min_size=2, max_size=12), group_size=st.integers(2, 8), data=st.data())
def test_passes_that_are_alike_have_hardly_more_tokens_than_full_ones(
    prompts: list[int], group_size: int, data: st.DataObject
) -> None:
    count = len(prompts) * group_size
    responses = np.array(data.draw(st.lists(st.integers(10, 3000), min_size=count, max_size=count)))
    groups = np.repeat(np.arange(len(prompts)), group_size)
    heads = np.array(prompts)[groups]
    [plan] = plan_packed(heads, responses, groups, range(count), ranks=1, max_tokens=16384)
    members = [tuple(np.flatnonzero(groups == group).tolist()) for group in range(len(prompts))]
    full = _fill_packed(heads + responses, responses, members, 16384)

    def tokens(passes: list[tuple[int, ...]]) -> int:
        return sum(
            responses[list(each)].sum() + sum(prompts[group] for group in set(groups[list(each)])) for each in passes
        )

    assert len(plan) == len(full)
    assert tokens([rows.rollouts for rows in plan]) <= 1.02 * tokens(full)


def test_no_short_pass_is_left_over() -> None:
    count = 32
    heads, responses, groups = np.full(count, 256), np.full(count, 1568), np.arange(count) // 8
    [plan] = plan_packed(heads, responses, groups, range(count), ranks=1, max_tokens=16384)
    assert [len(rows.rollouts) for rows in plan] == [8] * 4, "and not 10, 10, 10 and 2"


def test_a_pass_predicts_each_response_token_from_the_position_before_it() -> None:
    step = example()
    batch = microbatch(step, Rows((0, 2, 1)), torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [10, 11, 12, 0, 0], [1, 2, 6, 0, 0]]
    assert batch.targets.tolist() == [3, 4, 5, 11, 12, 6]
    assert batch.input_ids.flatten()[batch.sources + 1].tolist() == batch.targets.tolist()
    assert batch.response_mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert step.token_ids[batch.tokens.numpy()].tolist() == batch.targets.tolist()


def test_a_packed_pass_is_one_row_with_the_same_tokens_and_no_padding() -> None:
    padded, packed = (microbatch(example(), Rows((0, 2, 1)), torch.device("cpu"), packed=way) for way in (False, True))
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 10, 11, 12, 1, 2, 6]]
    assert packed.packed == ((2, 3), (1, 2), (2, 1))
    assert packed.input_ids.flatten()[packed.sources + 1].tolist() == packed.targets.tolist()
    for name in ("targets", "tokens", "response_mask", "places", "rollouts"):
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name


def test_neighbours_of_one_group_share_a_prompt_whose_end_predicts_the_first_token_of_each() -> None:
    padded, packed = (microbatch(example(), Rows((1, 0, 3)), torch.device("cpu"), packed=way) for way in (False, True))
    assert packed.input_ids.tolist() == [[1, 2, 6, 3, 4, 5, 10, 13]]
    assert packed.packed == ((2, 1, 3), (1, 1))
    assert packed.sources.tolist() == [1, 1, 3, 4, 6]
    assert packed.targets.tolist() == [6, 3, 4, 5, 13]
    for name in ("targets", "tokens", "response_mask", "places", "rollouts"):
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name


def two_turns() -> StepRollouts:
    """One prompt, two responses: one of two sampled turns with given tokens between, one of a single turn."""
    checked = Rollout((Turn((3, 4), (-0.3, -0.4)), Turn((90, 91, 92)), Turn((5,), (-0.5,))), "stop")
    single = Rollout((Turn((6,), (-0.6,)),), "length")
    groups = [RolloutGroup((1, 2), (checked, single), policy_version=7)]
    return collate(groups, problems=[0], responses=["a", "b"], scores=[Score(value=0.0, correct=False)] * 2)


def test_given_tokens_are_context_and_nothing_else() -> None:
    step = two_turns()
    assert step.lengths.tolist() == [6, 1]
    assert step.num_sampled.tolist() == [3, 1]
    assert step.sampled.tolist() == [True, True, False, False, False, True, True]
    assert step.rollout_logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.6])
    batch = microbatch(step, Rows((0, 1)), torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 90, 91, 92, 5], [1, 2, 6, 0, 0, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [3, 4, 5, 6]
    assert batch.sources.tolist() == [1, 2, 6, 9], "5 is predicted from the last given token"
    assert batch.tokens.tolist() == [0, 1, 2, 3]
    assert batch.spread(torch.ones(4)).tolist() == batch.response_mask.tolist()
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.6])


def test_a_packed_pass_has_the_same_given_tokens() -> None:
    padded, packed = (microbatch(two_turns(), Rows((1, 0)), torch.device("cpu"), packed=way) for way in (False, True))
    assert packed.input_ids.tolist() == [[1, 2, 6, 3, 4, 90, 91, 92, 5]]
    assert packed.packed == ((2, 1, 6),)
    assert packed.sources.tolist() == [1, 1, 3, 7]
    assert packed.tokens.tolist() == [3, 0, 1, 2]
    for name in ("targets", "tokens", "response_mask", "places", "rollouts", "rollout_logprobs"):
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name


def test_a_loss_is_divided_by_what_was_sampled() -> None:
    training = Training(steps=1, prompts_per_step=1, group_size=2)
    [minibatch] = cut(two_turns(), plan_step(two_turns(), training), torch.device("cpu"))
    assert minibatch.num_tokens == minibatch.num_computed == 4
    assert minibatch.num_computed_with_context == 8 + 3


def test_batches_with_given_tokens_join_and_are_selected_from() -> None:
    both = join([example(), two_turns()])
    assert both.num_sampled.tolist() == [3, 1, 2, 1, 3, 1]
    chosen, expected = select(both, [2, 0]), join([two_turns(), select(example(), [0])])
    for name in ("token_ids", "sampled", "rollout_logprobs", "lengths", "num_sampled", "group_ids"):
        assert getattr(chosen, name).tolist() == getattr(expected, name).tolist(), name


def test_spreading_and_picking_are_inverse() -> None:
    batch = microbatch(example(), Rows((0, 2, 1)), torch.device("cpu"))
    values = torch.arange(1.0, 7.0, requires_grad=True)
    spread = batch.spread(values)
    assert spread.tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
    assert batch.pick(spread).tolist() == values.tolist()
    spread.sum().backward()
    assert values.grad.tolist() == [1.0] * 6


def test_a_pass_that_only_keeps_time_weighs_nothing() -> None:
    batch = microbatch(example(), IDLE, torch.device("cpu"))
    assert not batch.counts
    assert batch.response_mask.tolist() == [[0]]
    assert batch.look_up(torch.full((7,), torch.nan)).tolist() == [0], "its token is none of the step's"


def test_the_ranks_shares_join_in_order() -> None:
    both = join([example(), example()])
    assert both.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert both.problems == (5, 9, 5, 9)
    assert both.held.tolist() == list(range(8))
    assert both.token_ids.tolist() == [3, 4, 5, 6, 11, 12, 13] * 2
    assert both.sequence_lengths.tolist() == [5, 3, 3, 2] * 2
