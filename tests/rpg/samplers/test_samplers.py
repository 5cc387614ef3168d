"""What every engine has to do: one suite, run against each."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import scipy.stats
import torch
from transformers import PreTrainedModel

from rpg.samplers.base import ADMISSION_STEPS, Sampler
from rpg.samplers.vllm.dedicated import DedicatedSampler
from rpg.types import Pause, Rollout, RolloutGroup, Sampling, TurnRequest
from specs.schema.rollout import SAMPLERS, engine_of
from tests.rpg.tiny_engine import (
    EOS,
    MAX_LENGTH,
    PAD,
    PROMPT,
    PROMPTS,
    VOCABULARY,
    WORDS,
    every_rollout,
    fresh_logprobs,
    moved,
    open_engine,
    qwen3,
    reference_probabilities,
    sampling,
    save,
)

ENGINES = [
    "transformers",
    pytest.param("engines", marks=pytest.mark.more),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.more]),
    pytest.param("dedicated", marks=[pytest.mark.vllm, pytest.mark.long]),
    pytest.param("vllm engines", marks=[pytest.mark.vllm, pytest.mark.long]),
]
ENGINES_OF_MANY = ["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])]
DISTRIBUTIONS = [
    sampling(2),
    sampling(2, temperature=0.6),
    sampling(2, temperature=1.3, top_p=0.8),
    sampling(2, temperature=1.3, top_k=5),
    sampling(2, temperature=1.3, top_k=6, top_p=0.7),
]
CUTS = ["as_it_is", "cooler", "hotter_nucleus", "likeliest", "nucleus_of_likeliest"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return qwen3()


@pytest.fixture(scope="module")
def weights_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    save(model, directory)
    return directory


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, weights_dir: Path) -> Iterator[Sampler]:
    if request.param in ("vllm", "dedicated", "vllm engines"):
        pytest.importorskip("vllm", exc_type=ImportError)
    sampler = open_engine(request.param, weights_dir)
    yield sampler
    sampler.close()


def test_every_engine_that_a_spec_may_name_is_opened_by_its_module_and_tried_here() -> None:
    engines = [engine_of(section) for section in SAMPLERS]

    assert all(callable(import_module(f"rpg.samplers.{engine}").open_sampler) for engine in engines)
    assert set(engines) <= {getattr(tried, "values", (tried,))[0] for tried in ENGINES}


@pytest.mark.more
@pytest.mark.parametrize("engine", ENGINES_OF_MANY, indirect=True)
@pytest.mark.parametrize(
    "drawn",
    [
        # Eight seconds each; the last one cuts by both, of a temperature above 1.
        pytest.param(drawn, id=cut, marks=[] if cut in ("as_it_is", "nucleus_of_likeliest") else [pytest.mark.long])
        for cut, drawn in zip(CUTS, DISTRIBUTIONS, strict=True)
    ],
)
def test_20000_responses_follow_the_exact_distribution(
    engine: Sampler, model: PreTrainedModel, drawn: Sampling
) -> None:
    groups = engine.generate([PROMPT] * 40, group_size=500, sampling=drawn, seeds=range(1000, 1040))

    counts = Counter(rollout.response_ids for _, rollout in every_rollout(groups))
    expected = {response: 20_000 * p for response, p in exact_distribution(model, drawn).items()}
    assert set(counts) <= set(expected)
    assert chi_square_p(counts, expected) > 0.001


def exact_distribution(model: PreTrainedModel, drawn: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of each response to PROMPT of two tokens, or one if that ends it."""
    firsts = range(VOCABULARY)
    ids = torch.tensor([[*PROMPT, first] for first in firsts])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    first_logits, second_logits = logits[:1, len(PROMPT) - 1], logits[:, len(PROMPT)]
    one, two = reference_probabilities(first_logits, drawn)[0], reference_probabilities(second_logits, drawn)
    exact = {(EOS,): float(one[EOS])}
    exact |= {(a, b): float(one[a] * two[a, b]) for a in firsts if a != EOS for b in firsts}
    return {response: p for response, p in exact.items() if p > 0}


def chi_square_p(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Responses expected fewer than five times are counted together."""
    common = [response for response, count in expected.items() if count >= 5]
    rare = [response for response in expected if expected[response] < 5]
    observed = [counts[response] for response in common] + [sum(counts[response] for response in rare)]
    wanted = [expected[response] for response in common] + [sum(expected[response] for response in rare)]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(scipy.stats.chisquare(observed, wanted, sum_check=False).pvalue)


@pytest.mark.more
@pytest.mark.parametrize(
    "drawn",
    [sampling(), sampling(temperature=0.7), sampling(temperature=1.2, top_p=0.9), sampling(top_k=4, top_p=0.9)],
    ids=str,
)
def test_logprobs_are_those_of_a_fresh_forward_pass(engine: Sampler, model: PreTrainedModel, drawn: Sampling) -> None:
    groups = engine.generate(PROMPTS, group_size=4, sampling=drawn, seeds=range(5))

    for prompt, rollout in every_rollout(groups):
        fresh = fresh_logprobs(model, prompt, rollout.response_ids, drawn)
        assert torch.tensor(rollout.rollout_logprobs).sub(fresh).abs().max() < 1e-4


def test_one_seed_gives_one_output(engine: Sampler) -> None:
    first = engine.generate(PROMPTS, group_size=3, sampling=sampling(), seeds=[3, 1, 4, 1, 5])

    assert engine.generate(PROMPTS, group_size=3, sampling=sampling(), seeds=[3, 1, 4, 1, 5]) == first
    assert engine.generate(PROMPTS, group_size=3, sampling=sampling(), seeds=[9, 9, 9, 9, 9]) != first


def test_batch_mates_change_no_token(engine: Sampler) -> None:
    alone = engine.generate([PROMPT], group_size=3, sampling=sampling(), seeds=[7])

    for mates in (PROMPTS, [[2]] * 60):
        seeds = [*range(100, 100 + len(mates)), 7]
        crowd = engine.generate([*mates, PROMPT], group_size=3, sampling=sampling(), seeds=seeds)
        for in_crowd, by_itself in zip(crowd[-1].rollouts, alone[0].rollouts, strict=True):
            assert in_crowd.response_ids == by_itself.response_ids
            assert in_crowd.rollout_logprobs == pytest.approx(by_itself.rollout_logprobs, abs=1e-5)


def test_another_thread_may_sample_and_load(engine: Sampler, model: PreTrainedModel) -> None:
    here = engine.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))

    def there() -> list[RolloutGroup]:
        engine.load_weights(model.named_parameters(), policy_version=engine.policy_version)
        return engine.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))

    with ThreadPoolExecutor(max_workers=1) as pool:
        groups = pool.submit(there).result()

    assert [rollout.response_ids for _, rollout in every_rollout(groups)] == [
        rollout.response_ids for _, rollout in every_rollout(here)
    ]


def test_siblings_and_neighbouring_seeds_are_drawn_apart(engine: Sampler) -> None:
    groups = engine.generate([PROMPT] * 8, group_size=8, sampling=sampling(), seeds=range(8))

    responses = Counter(rollout.response_ids for _, rollout in every_rollout(groups))
    long = [response for response in responses if len(response) > 8]
    assert long
    assert all(responses[response] == 1 for response in long)


def test_a_response_ends_at_the_end_token_or_at_its_limit(engine: Sampler) -> None:
    groups = engine.generate(PROMPTS, group_size=8, sampling=sampling(10), seeds=range(5))

    reasons = Counter(rollout.finish_reason for _, rollout in every_rollout(groups))
    assert set(reasons) == {"stop", "length"}
    for _, rollout in every_rollout(groups):
        assert EOS not in rollout.response_ids[:-1]
        assert (rollout.response_ids[-1] == EOS) == (rollout.finish_reason == "stop")
        assert len(rollout.response_ids) == 10 or rollout.finish_reason == "stop"
        assert len(rollout.rollout_logprobs) == len(rollout.response_ids)


def test_each_prompt_may_have_a_limit_of_its_own(engine: Sampler) -> None:
    limits = [1, 7, 3, 30, 2]
    free = engine.generate(PROMPTS, group_size=4, sampling=sampling(30), seeds=range(5))

    groups = engine.generate(PROMPTS, group_size=4, sampling=sampling(5), seeds=range(5), limits=limits)

    for limit, group, uncut in zip(limits, groups, free, strict=True):
        for rollout, whole in zip(group.rollouts, uncut.rollouts, strict=True):
            assert rollout.response_ids == whole.response_ids[:limit]
            assert rollout.finish_reason == ("length" if len(whole.response_ids) > limit else whole.finish_reason)
    with pytest.raises(
        ValueError, match="2 prompts but limits \\[3, 0\\]: each prompt needs exactly one limit, of at least 1"
    ):
        engine.generate(PROMPTS[:2], group_size=1, sampling=sampling(), seeds=[1, 2], limits=[3, 0])


def test_a_response_ends_where_prompt_and_response_fill_the_length(engine: Sampler) -> None:
    prompt = [5] * (MAX_LENGTH - 6)

    groups = engine.generate([prompt, PROMPT], group_size=16, sampling=sampling(MAX_LENGTH), seeds=[1, 2])

    cut = {len(rollout.response_ids) for rollout in groups[0].rollouts if rollout.finish_reason == "length"}
    longest = [max(len(rollout.response_ids) for rollout in group.rollouts) for group in groups]
    assert cut == {6}
    assert longest[0] == 6
    assert longest[1] > 6


def test_a_response_ends_with_the_token_that_completes_a_stop_text(engine: Sampler) -> None:
    """Texts within a token (`f`), over two (`bba` is b+ba or b+b+a), and with more text after them in their token."""
    stop = ("f", "bba", "c ")
    groups = engine.generate(PROMPTS, group_size=40, sampling=sampling(16, stop=stop), seeds=range(5))

    seen = Counter(end_of(rollout, stop) for _, rollout in every_rollout(groups))
    assert set(seen) == {"end token", "length", *stop}


def end_of(rollout: Rollout, stop: tuple[str, ...]) -> str:
    """Returns the reason of its end, having checked that nothing before the last token would have."""
    words = ["" if token in (EOS, PAD) else WORDS[token] for token in rollout.response_ids]
    assert not any(text in "".join(words[:-1]) for text in stop)
    assert EOS not in rollout.response_ids[:-1]
    assert len(rollout.rollout_logprobs) == len(rollout.response_ids)
    complete = [text for text in stop if text in "".join(words)]
    ended = bool(complete) or rollout.response_ids[-1] == EOS
    assert rollout.finish_reason == ("stop" if ended else "length")
    assert ended or len(rollout.response_ids) == 16
    return complete[0] if complete else "end token" if ended else "length"


def test_a_stop_text_changes_nothing_before_it(engine: Sampler) -> None:
    free = engine.generate(PROMPTS, group_size=8, sampling=sampling(), seeds=range(5))
    stopped = engine.generate(PROMPTS, group_size=8, sampling=sampling(stop=("f", "bba")), seeds=range(5))

    pairs = list(zip(every_rollout(free), every_rollout(stopped), strict=True))
    for (_, whole), (_, part) in pairs:
        assert whole.response_ids[: len(part.response_ids)] == part.response_ids
    assert any(len(part.response_ids) < len(whole.response_ids) for (_, whole), (_, part) in pairs)


def test_greedy_takes_the_likeliest_token_with_certainty(engine: Sampler, model: PreTrainedModel) -> None:
    groups = engine.generate(PROMPTS, group_size=2, sampling=sampling(temperature=0.0), seeds=range(5))

    for prompt, rollout in every_rollout(groups):
        ids = torch.tensor([prompt + rollout.response_ids])
        with torch.no_grad():
            likeliest = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert rollout.response_ids == tuple(likeliest.tolist())
        assert rollout.rollout_logprobs == (0.0,) * len(rollout.response_ids)


def test_a_thousand_requests_at_once_come_back_in_order(engine: Sampler) -> None:
    prompts = [[2 + i % 10] * (1 + i % 7) for i in range(250)]

    groups = engine.generate(prompts, group_size=4, sampling=sampling(8), seeds=range(250))

    assert [list(group.prompt_ids) for group in groups] == prompts
    assert all(len(group.rollouts) == 4 for group in groups)


def test_a_stream_samples_what_is_admitted_as_a_call_does(engine: Sampler) -> None:
    whole = engine.generate(PROMPTS, group_size=3, sampling=sampling(40), seeds=range(5))
    told: dict[int, Rollout] = {}
    questions: list[int] = []

    def admit() -> int | None:
        questions.append(len(told))
        return None if len(told) == 9 else 1 if len(questions) == 1 else 3

    unfinished = engine.stream(
        PROMPTS, group_size=3, sampling=sampling(40), seeds=range(5), admit=admit, on_response=told.__setitem__
    )

    assert unfinished == 0
    assert questions[0] == 0
    assert questions[-1] == 9
    assert len(questions) > 2, "it is asked while responses are under way"
    for index, rollout in told.items():
        expected = whole[index // 3].rollouts[index % 3]
        assert rollout.response_ids == expected.response_ids
        assert rollout.finish_reason == expected.finish_reason
        assert rollout.rollout_logprobs == pytest.approx(expected.rollout_logprobs, abs=1e-5)


def test_a_turn_begins_while_others_go_on_and_is_what_it_would_be_alone(engine: Sampler) -> None:
    """Three responses of four turns each: as soon as one ends, its next turn begins behind tokens that are given."""
    given, most = (5, 6), 12
    contexts = {number: tuple(prompt) for number, prompt in enumerate(PROMPTS[:3])}
    turns_left = dict.fromkeys(contexts, 4)
    ready, asked = sorted(contexts), list[int]()
    requests: list[TurnRequest] = []
    ended: list[tuple[int, Rollout]] = []
    pauses = set[Pause]()

    def next_turns(pause: Pause) -> list[TurnRequest] | None:
        pauses.add(pause)
        if pause == "idle" and not ready:
            return None
        new = [
            TurnRequest(contexts[number], seed=100 * number + turns_left[number], limit=most, prompt=number)
            for number in ready
        ]
        asked.extend(ready)
        requests.extend(new)
        ready.clear()
        return new

    def note(number: int, rollout: Rollout) -> None:
        ended.append((number, rollout))
        response = asked[number]
        turns_left[response] -= 1
        contexts[response] += (*rollout.response_ids, *given)
        if turns_left[response]:
            ready.append(response)

    assert engine.serve(next_turns, sampling=sampling(most), on_response=note) == 0
    assert sorted(number for number, _ in ended) == list(range(12))
    assert {"idle", "ended"} <= pauses or (engine.engines > 1 and pauses == {"idle"})
    alone = [
        engine.generate([turn.token_ids], group_size=1, sampling=sampling(most), seeds=[turn.seed])[0].rollouts[0]
        for turn in requests
    ]
    for number, rollout in ended:
        assert rollout.response_ids == alone[number].response_ids
        assert rollout.rollout_logprobs == pytest.approx(alone[number].rollout_logprobs, abs=1e-4)
        assert rollout.finish_reason == alone[number].finish_reason


def test_who_gives_turns_may_end_the_call_in_the_middle(engine: Sampler) -> None:
    asked: list[Pause] = []

    def next_turns(pause: Pause) -> list[TurnRequest] | None:
        asked.append(pause)
        return [TurnRequest((5,), seed=1, limit=MAX_LENGTH - 1)] if len(asked) == 1 else None

    rollouts: list[Rollout] = []
    left = engine.serve(
        next_turns, sampling=sampling(MAX_LENGTH), on_response=lambda _, rollout: rollouts.append(rollout)
    )
    assert asked[1] in ("steps", "ended", "idle")
    assert (left > 0) == (not rollouts)


def test_an_unfinished_turn_goes_on_where_it_was_cut(engine: Sampler) -> None:
    """Both parts are drawn from the policy, the second one from the first's end; a turn that has ended is not told."""
    ended: dict[int, Rollout] = {}
    cut: dict[int, Rollout] = {}
    turns = [[TurnRequest(tuple(PROMPT), seed=seed, limit=60) for seed in range(20)], None]
    left = engine.serve(
        lambda pause: [] if pause == "ended" else turns.pop(0),
        sampling=sampling(60),
        on_response=ended.__setitem__,
        on_unfinished=cut.__setitem__,
    )
    assert left == sum(rollout.num_sampled for rollout in cut.values()) > 0
    assert sorted([*ended, *cut]) == list(range(20))
    whole = engine.generate([PROMPT] * 20, group_size=1, sampling=sampling(60), seeds=range(20))
    for number, rollout in (ended | cut).items():
        expected, count = whole[number].rollouts[0], rollout.num_sampled
        assert rollout.response_ids == expected.response_ids[:count]
        assert rollout.rollout_logprobs == pytest.approx(expected.rollout_logprobs[:count], abs=1e-4)
        assert (number in ended) == (count == expected.num_sampled)
    assert len({rollout.num_sampled for rollout in cut.values()}) == 1, "all were cut at one time"


def test_a_turn_without_room_is_named(engine: Sampler) -> None:
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        engine.serve(lambda _: [TurnRequest((), seed=1, limit=3)], sampling=sampling(4), on_response=lambda *_: None)
    assert len(engine.generate([PROMPT], group_size=1, sampling=sampling(2), seeds=[0])) == 1


def test_a_stream_ends_in_the_middle_and_counts_what_is_lost(engine: Sampler) -> None:
    whole = engine.generate(PROMPTS, group_size=3, sampling=sampling(40), seeds=range(5))
    told: dict[int, Rollout] = {}
    answers = iter([5, 5, None])

    unfinished = engine.stream(
        PROMPTS,
        group_size=3,
        sampling=sampling(40),
        seeds=range(5),
        admit=lambda: next(answers),
        on_response=told.__setitem__,
    )

    most = {i * 3 + j: len(whole[i].rollouts[j].response_ids) for i in range(5) for j in range(3)}
    steps = 2 * ADMISSION_STEPS
    assert told.keys() == {index for index, length in most.items() if length <= steps}
    left = len(most) - len(told)
    # An engine that schedules ahead has not told of the tokens of its last step.
    assert left * (steps - 1) <= unfinished <= left * steps
    assert unfinished > 0
    assert engine.generate(PROMPTS, group_size=3, sampling=sampling(40), seeds=range(5)) == whole


def test_an_error_of_who_admits_ends_a_stream(engine: Sampler) -> None:
    if isinstance(engine, DedicatedSampler):
        pytest.skip("the trainer ends with the error, and its engine with the trainer")

    def admit() -> int | None:
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        engine.stream(PROMPTS, group_size=1, sampling=sampling(), seeds=range(5), admit=admit, on_response=print)
    assert len(engine.generate(PROMPTS, group_size=1, sampling=sampling(), seeds=range(5))) == 5


def test_the_weights_loaded_are_the_weights_used(engine: Sampler, model: PreTrainedModel) -> None:
    update = moved(model)
    version = engine.policy_version

    engine.load_weights(update.named_parameters(), policy_version=version + 1)
    try:
        groups = engine.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
    finally:
        engine.load_weights(model.named_parameters(), policy_version=version + 2)

    assert {group.policy_version for group in groups} == {version + 1}
    for prompt, rollout in every_rollout(groups):
        fresh = fresh_logprobs(update, prompt, rollout.response_ids, sampling())
        assert torch.tensor(rollout.rollout_logprobs).sub(fresh).abs().max() < 1e-4
    assert engine.generate([PROMPT], group_size=1, sampling=sampling(), seeds=[0])[0].policy_version == version + 2


def test_logprobs_of_given_tokens_are_the_models(engine: Sampler, model: PreTrainedModel) -> None:
    prompt, response = (5, 7, 3), (4, 4, 9, EOS)

    given = engine.logprobs(prompt + response, prompt_length=3)

    assert given == pytest.approx(fresh_logprobs(model, prompt, response, sampling()).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([[5], []], [1, 2], "prompt 1 has 0 tokens; allowed: 1 to 63, which leave room for a response"),
        ([[5] * 64], [1], "prompt 0 has 64 tokens; allowed: 1 to 63, which leave room for a response"),
        ([[5], [6]], [1], "2 prompts but 1 seeds: each prompt needs exactly one seed"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(
    engine: Sampler, prompts: list[list[int]], seeds: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, group_size=1, sampling=sampling(), seeds=seeds)


@pytest.mark.more
def test_no_prompts_give_no_groups(engine: Sampler) -> None:
    assert engine.generate([], group_size=4, sampling=sampling(), seeds=[]) == []
