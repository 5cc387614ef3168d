"""Chunked logprobs against the plain way."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import pytest
import torch
from torch import Tensor

from rpg.learner.logprobs import (
    Compared,
    has_head_kernel,
    likeliest_tokens,
    multiplies_into_float32,
    token_divergences,
    token_logprobs,
)
from rpg.objectives.distribution import summed
from specs.schema.objective import Divergence
from tests.memory import PeakMemory
from tests.rpg.tiny_run import finish, start

TOKENS, HIDDEN, VOCABULARY = 13, 8, 11


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) / temperature
    distribution = torch.log_softmax(logits, -1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [None, 1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_the_plain_way(
    chunk: int | None, temperature: float, with_bias: bool, entropy_gradient: bool
) -> None:
    hidden, weight, bias, targets = inputs()
    used = bias if with_bias else None
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperature=temperature, bias=used, chunk=chunk, entropy_gradient=entropy_gradient
    )
    expected_logprobs, expected_entropy = plain(hidden, weight, used, targets, temperature)
    assert torch.allclose(logprobs, expected_logprobs, rtol=1e-12)
    assert torch.allclose(entropy, expected_entropy, rtol=1e-11)

    steps = torch.arange(TOKENS, dtype=torch.float64).cos()
    wanted = [tensor for tensor in (hidden, weight, used) if tensor is not None]
    share = 0.3 if entropy_gradient else 0.0
    actual = torch.autograd.grad((steps * logprobs + share * steps * entropy).sum(), wanted)
    expected = torch.autograd.grad((steps * expected_logprobs + share * steps * expected_entropy).sum(), wanted)
    for gradient, exact in zip(actual, expected, strict=True):
        assert torch.allclose(gradient, exact, rtol=1e-10, atol=1e-12)


DIVERGENCES = get_args(Divergence)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("long_row", [0, 10**6])
def test_divergences_over_the_vocabulary_have_the_values_and_gradients_of_the_plain_way(
    divergence: Divergence,
    chunk: int | None,
    entropy_gradient: bool,
    extra: int,
    long_row: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`extra`: tokens that only the reference has, whose hidden states have another size too. `long_row`: number of
    columns from which rows are multiplied one after the other."""
    monkeypatch.setattr("rpg.learner.logprobs._LONG_ROW", long_row)
    hidden, weight, bias, targets = inputs()
    generator = torch.Generator().manual_seed(4)
    shapes = ((TOKENS, HIDDEN + extra), (VOCABULARY + extra, HIDDEN + extra), (VOCABULARY + extra,))
    compared = Compared(divergence, *(torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes))
    logprobs, entropy, state, ref_logprobs = token_divergences(
        hidden, weight, targets, compared, temperature=0.7, bias=bias, chunk=chunk, entropy_gradient=entropy_gradient
    )
    assert compared.bias is not None
    policy = torch.log_softmax((hidden @ weight.T + bias) / 0.7, -1)
    reference = torch.log_softmax((compared.hidden @ compared.weight.T + compared.bias) / 0.7, -1)[:, :VOCABULARY]
    expected = summed(divergence, policy, reference)
    assert torch.allclose(state.value, expected, atol=1e-13)
    assert torch.allclose(state.reverse, summed("unnormalized_reverse", policy, reference))
    assert torch.allclose(state.forward, summed("unnormalized_forward", policy, reference))
    assert torch.allclose(ref_logprobs, reference.gather(1, targets[:, None])[:, 0], rtol=1e-12)
    assert not ref_logprobs.requires_grad
    steps = torch.arange(TOKENS, dtype=torch.float64).cos()
    share = 0.3 if entropy_gradient else 0.0
    plain_logprobs, plain_entropy = plain(hidden, weight, bias, targets, 0.7)
    loss = (steps * logprobs + steps.flip(0) * state.value + share * entropy).sum()
    plain_loss = (steps * plain_logprobs + steps.flip(0) * expected + share * plain_entropy).sum()
    pairs = zip(*(torch.autograd.grad(each, (hidden, weight, bias)) for each in (loss, plain_loss)), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in pairs)


@pytest.mark.parametrize("divergence", [each for each in DIVERGENCES if each != "none"])
def test_a_policy_that_is_the_reference_has_neither_divergence_nor_gradient_in_any_bit(divergence: Divergence) -> None:
    """Adam would turn the rounding error of a gradient that is 0 into a step."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(64, 128, generator=generator).requires_grad_() for _ in range(2))
    compared = Compared(divergence, hidden.detach(), weight.detach(), None)
    logprobs, _, state, ref_logprobs = token_divergences(
        hidden, weight, torch.arange(64), compared, temperature=0.7, chunk=10
    )
    assert torch.equal(ref_logprobs, logprobs)
    assert not any(values.any() for values in (state.value, state.reverse, state.forward))
    assert not any(gradient.any() for gradient in torch.autograd.grad(state.value.sum(), (hidden, weight)))


@pytest.mark.parametrize(("divergence", "blocks"), [("reverse", 3), ("unnormalized_forward", 3), ("jensen_shannon", 5)])
def test_a_comparison_holds_as_many_blocks_of_logits_as_the_plan_counts(divergence: Divergence, blocks: int) -> None:
    """`pipelines.planning.memory` adds one to the two of a policy alone, or three."""
    generator = torch.Generator().manual_seed(6)
    shapes = ((64, 8), (20_000, 8), (64, 8), (20_000, 8))
    hidden, weight, *reference = (torch.randn(shape, generator=generator) for shape in shapes)
    hidden.requires_grad_()
    with PeakMemory([hidden, weight, *reference]) as memory:
        compared = Compared(divergence, *reference, None)
        logprobs, _, state, _ = token_divergences(hidden, weight, torch.arange(64), compared, chunk=32)
        (logprobs.sum() + state.value.sum()).backward()
    assert memory.peak == pytest.approx(blocks * 32 * 20_000 * 4, rel=0.01)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_several_targets_of_a_token_have_the_gradients_of_the_plain_way(entropy_gradient: bool) -> None:
    hidden, weight, bias, targets = inputs()
    ids = (targets[:, None] + torch.tensor([0, 3, 4])) % VOCABULARY
    logprobs, entropy = token_logprobs(
        hidden, weight, ids, bias=bias, chunk=5, temperature=0.7, entropy_gradient=entropy_gradient
    )
    expected = torch.log_softmax((hidden @ weight.T + bias) / 0.7, -1).gather(1, ids)
    assert torch.allclose(logprobs, expected, rtol=1e-12)
    steps = torch.arange(3 * TOKENS, dtype=torch.float64).cos().view(TOKENS, 3)
    share = 0.3 if entropy_gradient else 0.0
    plain_loss = (steps * expected).sum() + share * plain(hidden, weight, bias, targets, 0.7)[1].sum()
    losses = (steps * logprobs).sum() + share * entropy.sum(), plain_loss
    pairs = zip(*(torch.autograd.grad(each, (hidden, weight, bias)) for each in losses), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in pairs)


def test_the_likeliest_tokens_are_those_of_the_plain_way_and_the_targets_logprobs_the_same_bits() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    logprobs, ids, likeliest = likeliest_tokens(hidden, weight, targets, 3, temperature=0.7, bias=bias, chunk=5)
    expected = torch.log_softmax((hidden @ weight.T + bias) / 0.7, -1).topk(3)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(likeliest, expected.values, atol=1e-6)
    assert torch.equal(logprobs, token_logprobs(hidden, weight, targets, temperature=0.7, bias=bias, chunk=5)[0])
    assert likeliest_tokens(hidden, weight, targets, 99)[1].shape == (TOKENS, VOCABULARY)
    assert likeliest_tokens(hidden, weight, targets, 99, vocabulary=4)[1].max() == 3


def test_the_gradient_passes_the_finite_difference_check() -> None:
    hidden, weight, bias, targets = inputs()

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, targets, temperature=0.7, bias=bias, chunk=4, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_the_entropy_has_no_gradient_unless_asked_for() -> None:
    hidden, weight, _, targets = inputs()
    assert not token_logprobs(hidden, weight, targets)[1].requires_grad
    assert token_logprobs(hidden, weight, targets, entropy_gradient=True)[1].requires_grad


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, _, targets = inputs()
    token_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_give_float32_logprobs_and_gradients_in_their_own_type(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = inputs(dtype)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=5)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logprobs.sum().backward()
    assert weight.grad.dtype == dtype
    wide_hidden, wide_weight = hidden.detach().double(), weight.detach().double().requires_grad_()
    plain(wide_hidden, wide_weight, None, targets, 1.0)[0].sum().backward()
    assert (weight.grad - wide_weight.grad).norm() < 0.01 * wide_weight.grad.norm()


def test_logits_of_half_precision_inputs_are_not_rounded_to_half_precision() -> None:
    # Logits around 40, where bfloat16 has steps of 0.25.
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(64, 128, generator=generator).mul(3).bfloat16() for _ in range(2))
    targets = torch.arange(64)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=10)
    exact_logprobs, exact_entropy = plain(hidden.double(), weight.double(), None, targets, 1.0)
    assert float((hidden @ weight.T).abs().max()) > 100
    assert float((logprobs - exact_logprobs).abs().max()) < 1e-4
    assert float((entropy - exact_entropy).abs().max()) < 1e-4


def test_the_products_that_a_gpu_has_are_called_as_torch_wants_it() -> None:
    # A tensor without values takes the way of a GPU: torch has these products for it, and none for a CPU.
    hidden, weight, bias, targets = (tensor.to("meta") for tensor in inputs(torch.bfloat16))
    hidden, weight, bias = (tensor.detach().requires_grad_() for tensor in (hidden, weight, bias))
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias=bias, chunk=5, entropy_gradient=True)
    gradients = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight, bias))
    assert [(gradient.dtype, gradient.shape) for gradient in gradients] == [
        (torch.bfloat16, tensor.shape) for tensor in (hidden, weight, bias)
    ]


@contextmanager
def products_of_a_gpu(*, can_add: bool) -> Iterator[None]:
    """Gives the CPU the products into float32 that torch has for GPUs; as an early torch has it, none that adds."""

    def multiply(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        return left.to(dtype) @ right.to(dtype)

    def multiply_into(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        return out.copy_(multiply(left, right, dtype))

    def add(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        if not can_add:
            raise RuntimeError("self and mat2 must have the same dtype")
        return out.copy_(total + multiply(left, right, dtype))

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in (("mm.dtype", multiply), ("mm.dtype_out", multiply_into), ("addmm.dtype_out", add)):
            library.impl(name, kernel, "CPU")
        multiplies_into_float32.cache_clear()
        try:
            yield
        finally:
            multiplies_into_float32.cache_clear()


@pytest.mark.parametrize("can_add", [True, False])
def test_gradients_by_the_products_of_a_gpu_are_those_without(can_add: bool) -> None:
    hidden, weight, bias, targets = inputs(torch.bfloat16)

    def gradients() -> tuple[Tensor, ...]:
        logprobs, _ = token_logprobs(hidden, weight, targets, bias=bias, chunk=5)
        return logprobs, *torch.autograd.grad((logprobs * torch.arange(TOKENS)).sum(), (hidden, weight, bias))

    without = gradients()
    with products_of_a_gpu(can_add=can_add):
        assert multiplies_into_float32(torch.device("cpu")) == can_add
        for value, other in zip(gradients(), without, strict=True):
            assert torch.allclose(value.float(), other.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "full",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["allocator", "cublas"],
)
def test_a_full_gpu_is_not_taken_for_one_without_the_products(
    full: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(*_: object, **__: object) -> Tensor:
        raise full

    with products_of_a_gpu(can_add=True):
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(torch, "mm", multiply)
            with pytest.raises(RuntimeError, match=re.escape(str(full))):
                multiplies_into_float32(torch.device("cpu"))
        assert multiplies_into_float32(torch.device("cpu"))


def test_the_weights_gradient_in_half_precision_does_not_get_worse_with_more_chunks() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    gradients = []
    for chunk in (1, TOKENS):
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk=chunk)
        gradients += torch.autograd.grad(logprobs.sum(), weight)
    assert (gradients[0].double() - gradients[1].double()).norm() < 0.005 * gradients[1].double().norm()


def test_a_likely_token_has_a_logprob_of_zero_and_an_impossible_one_stays_finite() -> None:
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([[300.0], [-300.0]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0, 1]))
    assert logprobs.tolist() == [0, -600]
    assert entropy.tolist() == [0, 0]


def test_no_tokens_are_no_trouble() -> None:
    hidden, weight, _, _ = inputs()
    logprobs, entropy = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(ValueError, match=r"hidden \[13, 8\]"):
        token_logprobs(hidden, weight[:, :4], targets)


@pytest.mark.more
def test_the_kernel_of_the_head_computes_what_pytorch_does() -> None:
    """In float32, with and without remainders of vocabulary and chunk; Triton's interpreter executes it, on a CPU."""
    command = [sys.executable, "-m", "tests.rpg.head_kernel_worker"]
    output = finish(start(command, environment={"TRITON_INTERPRET": "1"}))
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["used"]
    assert found["cases"] == 40
    assert max(found["worst"].values()) <= 1e-6


def test_a_cpu_does_without_the_kernel() -> None:
    assert not has_head_kernel(torch.device("cpu"))
