"""The transformers sampler: continuous batching changes the speed and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rpg.samplers import open_sampler
from rpg.samplers.transformers import decoding
from rpg.samplers.transformers.cache import ReturningContexts, SlotCache
from rpg.samplers.transformers.draws import BLOCK, draw, nucleus, uniforms
from rpg.samplers.transformers.sampler import TransformersSampler
from rpg.types import Rollout, RolloutGroup, Sampling, TurnRequest
from specs.errors import SpecError
from specs.schema.rollout import TransformersRollout
from tests.rpg.tiny_engine import EOS, PAD, PROMPT, PROMPTS, every_rollout, gpt2, llama, moved, on_cpu, qwen3, sampling


def sampler_of(model: PreTrainedModel, *, max_concurrent: int = 7, shared: bool = False) -> TransformersSampler:
    return TransformersSampler(model, eos_id=EOS, pad_id=PAD, max_concurrent=max_concurrent, shared=shared)


def response_ids(groups: Sequence[RolloutGroup]) -> list[tuple[int, ...]]:
    return [rollout.response_ids for _, rollout in every_rollout(list(groups))]


def one_at_a_time(model: PreTrainedModel, prompt: list[int], seed: int, member: int, drawn: Sampling) -> list[int]:
    """The response that a loop without cache, batch or slots draws with the same noise."""
    response: list[int] = []
    while len(response) < drawn.max_response_length and EOS not in response:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[:, -1].float()
        noise = torch.tensor([uniforms(seed, member, len(response) // BLOCK)[len(response) % BLOCK]])
        token, _ = draw(logits, noise, temperature=drawn.temperature, top_p=drawn.top_p, top_k=drawn.top_k)
        response.append(int(token))
    return response


@pytest.mark.more
@pytest.mark.parametrize("architecture", [qwen3, llama, gpt2])
@pytest.mark.parametrize("drawn", [sampling(90), sampling(30, temperature=0.8, top_p=0.9)], ids=str)
def test_a_batch_draws_what_each_response_alone_would(
    architecture: Callable[[], PreTrainedModel], drawn: Sampling
) -> None:
    model = architecture()

    groups = sampler_of(model).generate(PROMPTS, group_size=4, sampling=drawn, seeds=range(5))

    for prompt, seed, group in zip(PROMPTS, range(5), groups, strict=True):
        for member, rollout in enumerate(group.rollouts):
            assert list(rollout.response_ids) == one_at_a_time(model, prompt, seed, member, drawn)


@pytest.mark.parametrize("architecture", [qwen3, llama, gpt2])
def test_on_gpus_attention_sees_few_numbers_of_keys_and_draws_the_same(
    architecture: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels plan again for each number of keys. The input of a GPU is computed here on the CPU."""
    model = architecture()
    exact = sampler_of(model).generate(PROMPTS, group_size=4, sampling=sampling(120), seeds=range(5))
    widths = set[int]()
    aim = SlotCache.aim

    def noted(cache: SlotCache, rows: torch.Tensor, ends: torch.Tensor, *, width: int) -> None:
        widths.add(width)
        aim(cache, rows, ends, width=width)

    monkeypatch.setattr(SlotCache, "aim", noted)
    monkeypatch.setitem(decoding._WIDTHS, "cpu", decoding._WIDTHS["cuda"])
    wider = sampler_of(model).generate(PROMPTS, group_size=4, sampling=sampling(120), seeds=range(5))
    assert len(widths) <= 4
    assert all(width % 64 == 0 for width in widths)
    assert response_ids(wider) == response_ids(exact)
    for (_, rollout), (_, other) in zip(every_rollout(exact), every_rollout(wider), strict=True):
        assert rollout.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-5)


@pytest.mark.more
def test_a_cache_that_grows_loses_nothing() -> None:
    model = qwen3(vocabulary=80)

    [group] = sampler_of(model).generate([PROMPT], group_size=10, sampling=sampling(200), seeds=[2])

    assert (
        max(len(rollout.response_ids) for rollout in group.rollouts) > 101
    )  # room at first for 64, then for half more
    for member, rollout in enumerate(group.rollouts):
        assert list(rollout.response_ids) == one_at_a_time(model, PROMPT, 2, member, sampling(200))


def test_sequences_leave_and_enter_without_a_padded_row() -> None:
    model = qwen3()
    rows: list[int] = []

    def count(_: torch.nn.Module, __: object, inputs: dict[str, torch.Tensor]) -> None:
        if inputs["input_ids"].shape[1] == 1:  # a decoding step; a prefill pass takes whole prompts
            rows.append(inputs["input_ids"].shape[0])

    model.register_forward_pre_hook(count, with_kwargs=True)
    groups = sampler_of(model, max_concurrent=6).generate(PROMPTS, group_size=5, sampling=sampling(), seeds=range(5))

    lengths = [len(rollout.response_ids) for _, rollout in every_rollout(groups)]
    assert sum(rows) == sum(lengths), "each computed row gave a token of a response"
    assert max(rows) == 6
    assert rows[: sum(lengths) // 12] == [6] * (sum(lengths) // 12), "slots that end are filled at once"
    assert len(rows) < sum(max(lengths[first : first + 6]) for first in range(0, len(lengths), 6))


def test_slots_change_nothing() -> None:
    model = qwen3()
    alone = sampler_of(model).generate([PROMPT], group_size=3, sampling=sampling(), seeds=[7])

    for mates, concurrent in ((PROMPTS, 4), ([[2]] * 40, 64), ([[3] * 30], 1)):
        crowd = sampler_of(model, max_concurrent=concurrent).generate(
            [*mates, PROMPT], group_size=3, sampling=sampling(), seeds=[*range(100, 100 + len(mates)), 7]
        )
        assert response_ids(crowd[-1:]) == response_ids(alone)
        logprobs = [rollout.rollout_logprobs for rollout in crowd[-1].rollouts]
        for in_crowd, rollout in zip(logprobs, alone[0].rollouts, strict=True):
            assert in_crowd == pytest.approx(rollout.rollout_logprobs, abs=1e-5)


def test_a_larger_group_begins_with_the_smaller_one() -> None:
    sampler = sampler_of(qwen3())

    large = sampler.generate([PROMPT], group_size=9, sampling=sampling(), seeds=[7])
    small = sampler.generate([PROMPT], group_size=4, sampling=sampling(), seeds=[7])

    assert response_ids(large)[:4] == response_ids(small)


def test_any_of_several_end_tokens_ends_a_response() -> None:
    sampler = TransformersSampler(qwen3(), eos_id=(0, 4, 9), pad_id=PAD, max_concurrent=8)

    groups = sampler.generate(PROMPTS, group_size=8, sampling=sampling(), seeds=range(5))

    ends = {ids[-1] for ids in response_ids(groups)}
    assert {0, 4, 9} <= ends
    assert not any({0, 4, 9} & set(ids[:-1]) for ids in response_ids(groups))


def test_a_response_longer_than_a_block_of_noise_goes_on_with_fresh_noise() -> None:
    model = qwen3(context=BLOCK + 200)
    with torch.no_grad():  # flat, so that each token shows its noise
        model.get_input_embeddings().weight.mul_(1e-3)
    sampler = TransformersSampler(model, eos_id=(), pad_id=PAD, max_concurrent=2)

    [group] = sampler.generate([PROMPT], group_size=2, sampling=sampling(BLOCK + 100), seeds=[3])

    for member, rollout in enumerate(group.rollouts):
        noise = np.concatenate([uniforms(3, member, block) for block in (0, 1)])[: BLOCK + 100]
        assert abs(np.array(rollout.response_ids) - noise * 12).max() < 1.1
        assert rollout.response_ids[:100] != rollout.response_ids[BLOCK:]


def test_stop_texts_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    sampler = TransformersSampler(qwen3(), eos_id=EOS, pad_id=PAD, max_concurrent=8, tokenizer_dir=tmp_path)

    with pytest.raises(ValueError, match="stop texts need the policy's tokenizer; there is none in"):
        sampler.generate([PROMPT], group_size=1, sampling=sampling(stop=("x",)), seeds=[1])


def test_a_policy_without_a_tokenizer_and_a_spec_with_stop_texts_do_not_go_together(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path)

    with pytest.raises(SpecError, match=r"rollout\.stop: stop texts need the policy's tokenizer"):
        open_sampler(TransformersRollout(stop=("x",)), on_cpu(tmp_path))


def test_a_shared_module_keeps_its_modes_and_its_gradients() -> None:
    model = qwen3().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    sampler = sampler_of(model, shared=True)

    sampler.generate(PROMPTS, group_size=2, sampling=sampling(), seeds=range(5))
    sampler.logprobs([5, 6, 7], prompt_length=1)

    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention
    assert torch.is_grad_enabled()
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_shared_module_is_read_where_it_is() -> None:
    model = qwen3()
    sampler = sampler_of(model, shared=True)
    update = dict(moved(model).named_parameters())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(update[name])
    sampler.load_weights(iter(()), policy_version=5)

    [group] = sampler.generate([PROMPT], group_size=4, sampling=sampling(), seeds=[1])
    assert group.policy_version == 5
    assert (
        group.rollouts
        == sampler_of(moved(qwen3())).generate([PROMPT], group_size=4, sampling=sampling(), seeds=[1])[0].rollouts
    )


def test_weights_that_do_not_fit_the_model_are_named() -> None:
    sampler = sampler_of(qwen3())
    weights = dict(moved(qwen3()).named_parameters())

    with pytest.raises(ValueError, match=r"the model has no parameter other\.weight"):
        sampler.load_weights([("other.weight", torch.zeros(1))], policy_version=1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"no weights were given for model\.norm\.weight"):
        sampler.load_weights(weights.items(), policy_version=1)
    assert sampler.policy_version == 0


def test_a_tied_head_may_come_under_either_name() -> None:
    update = moved(qwen3())
    weights = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in update.named_parameters()}
    sampler = sampler_of(qwen3())

    sampler.load_weights(weights.items(), policy_version=1)

    assert sampler.logprobs([5, 6, 7], prompt_length=1) == sampler_of(update).logprobs([5, 6, 7], prompt_length=1)


def test_a_model_with_a_sliding_window_is_refused() -> None:
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        bos_token_id=None,
        eos_token_id=EOS,
    )

    with pytest.raises(ValueError, match="Qwen3ForCausalLM has layers without full attention"):
        sampler_of(Qwen3ForCausalLM(config))


def test_noise_depends_on_seed_response_and_position_alone() -> None:
    assert (uniforms(3, 1, 0, 10) == uniforms(3, 1, 0)[:10]).all()
    streams = [uniforms(seed, member, block) for seed in (0, 1, -1) for member in (0, 1) for block in (0, 1)]
    assert len({float(value) for stream in streams for value in stream}) == len(streams) * BLOCK
    assert abs(np.corrcoef(streams) - np.eye(len(streams))).max() < 0.15


def test_a_draw_inverts_the_distribution_function() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]).repeat(6, 1))
    noise = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)

    tokens, logprobs = draw(logits, noise, temperature=1.0, top_p=1.0)

    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.2, 0.2])


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).repeat(2, 1)

    tokens, _ = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), temperature=1.0, top_p=1.0)

    assert tokens.tolist() == [1, 2]


def test_the_likeliest_tokens_stay_with_what_ties() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1]]).repeat(4, 1))
    noise = torch.tensor([0.0, 0.51, 0.76, 1 - 2**-53], dtype=torch.float64)

    # Of 0.4, 0.2, 0.2, renormalised 0.5, 0.25, 0.25, in the order of their ids.
    tokens, logprobs = draw(logits, noise, temperature=1.0, top_p=1.0, top_k=2)

    assert tokens.tolist() == [1, 2, 3, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.25, 0.25, 0.25])


def test_the_nucleus_is_the_smallest_set_that_holds_top_p() -> None:
    logprobs = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))

    # 0.5 < 0.6, so the next likeliest is needed too; 0.5 + 0.25 = 0.75 holds 0.7 but not 0.8.
    assert nucleus(logprobs, 0.4).tolist() == [[False, True, False, False]]
    assert nucleus(logprobs, 0.6).tolist() == [[False, True, False, True]]
    assert nucleus(logprobs, 0.7).tolist() == [[False, True, False, True]]
    assert nucleus(logprobs, 0.8).tolist() == [[False, True, True, True]]


def test_of_what_is_kept_the_longest_beginning_is_found_and_the_oldest_goes_first() -> None:
    def rows(length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.zeros(1, length, 2), torch.zeros(1, length, 2))]

    returning = ReturningContexts()
    for tokens in ((1, 2), (1, 2, 3), (4, 5, 6, 7)):
        returning.keep(tokens, rows(len(tokens)))
    assert len(returning.of((1, 2, 3, 9, 9))[0][0][0]) == 3
    assert len(returning.of((1, 2, 3, 9))[0][0][0]) == 2, "something is left to compute"
    assert returning.of((1, 9, 9, 9)) == []
    returning.shrink(8)
    assert returning.of((1, 2, 9, 9)) == []
    assert returning.of((1, 2, 3, 9, 9))
    returning.shrink(0)
    assert returning.of((4, 5, 6, 7, 8, 9)) == []


class Talk:
    """A conversation of each prompt: after each turn some tokens are given, which differ in number."""

    def __init__(self, turns: int) -> None:
        self.contexts = [tuple(range(2, 12)) * 2 + (talk + 3,) for talk in range(5)]
        self.left = [turns] * 5
        self.asked: list[int] = []
        self.ready = list(range(5))
        self.turns: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = []
        self.given: list[tuple[int, ...]] = []

    def next_turns(self, pause: str) -> list[TurnRequest] | None:
        if pause == "idle" and not self.ready:
            return None
        ready, self.ready = sorted(self.ready), []
        self.asked += ready
        return [TurnRequest(self.contexts[talk], 7 * talk + self.left[talk], limit=6) for talk in ready]

    def ended(self, number: int, rollout: Rollout) -> None:
        talk = self.asked[number]
        (turn,) = rollout.turns
        self.turns.append((talk, turn.token_ids, turn.logprobs))
        self.left[talk] -= 1
        given = tuple(3 + (place * talk + self.left[talk]) % 7 for place in range(1 + 2 * talk))
        self.given.append(given)
        self.contexts[talk] += turn.token_ids + given
        if self.left[talk]:
            self.ready.append(talk)


@pytest.mark.parametrize("architecture", [qwen3, llama, gpt2])
def test_of_a_context_that_comes_back_only_what_is_new_is_computed(
    architecture: Callable[[], PreTrainedModel],
) -> None:
    model = architecture()
    computed: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _arguments, named: computed.append(named["input_ids"].numel()), with_kwargs=True
    )

    def sampled(max_length: int) -> Talk:
        talk = Talk(turns=4)
        ends = range(0, 12, 2)  # turns that end soon, and by themselves
        sampler = TransformersSampler(model, eos_id=ends, pad_id=PAD, max_concurrent=7, max_length=max_length)
        computed.clear()
        sampler.serve(talk.next_turns, sampling=sampling(6), on_response=talk.ended)
        return talk

    kept, counted = sampled(max_length=512), sum(computed)
    new = 5 * 21 + sum(map(len, kept.given)) + sum(len(ids) for _, ids, _ in kept.turns)
    assert counted < 1.2 * new, "but for padding"
    whole = sampled(max_length=64)  # no room beside the slots
    assert sum(computed) > 1.5 * counted
    assert [turn[:2] for turn in kept.turns] == [turn[:2] for turn in whole.turns]
    for (*_, logprobs), (*_, others) in zip(kept.turns, whole.turns, strict=True):
        assert logprobs == pytest.approx(others, abs=1e-5)
