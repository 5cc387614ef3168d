"""Enumerated worlds laid end to end, so that one call of a loss covers all of them, and what its gradient is there,
exactly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rpg.certificate.enumeration import (
    World,
    enumerate_world,
    response_probabilities,
    sequence_objective,
    token_objective,
)

SIZES = tuple((vocabulary, length) for vocabulary in (3, 4, 5) for length in (1, 2, 3, 4))
"""Vocabulary and length of the worlds."""
SIZES_OF_TURNS = tuple((vocabulary, length) for vocabulary in (3, 4) for length in (3, 4, 5))
"""Sizes of the worlds of several turns: what is shorter has no room for a given token."""
SEEDS = (0, 1)
SITUATIONS = tuple((policy, reference) for policy in ("on_policy", "off_policy") for reference in ("sampler", "apart"))
"""Whether the policy is the sampler, and whether the reference is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One world with its three policies."""

    world: World
    policy: Tensor
    sampler: Tensor
    reference: Tensor
    engine: Tensor
    """Policy by which the responses are drawn: the sampler, or as an engine of its own computes it."""
    situation: int
    """Index into SITUATIONS."""


@dataclass(frozen=True, slots=True)
class Cases:
    """All cases as one batch of responses, and one table of prefixes."""

    logprobs: Tensor
    """[responses, length], as are the next two; float64, 0 on padding and on given tokens."""
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    """[responses, length], by the engine."""
    entropy: Tensor
    """[responses, length], of the policy before each token."""
    response_mask: Tensor
    """[responses, length], bool: what was sampled."""
    rewards: Tensor
    """[responses], with those of turns."""
    centred: Tensor
    """[responses]: the rewards less the case's mean under the engine."""
    earlier: Tensor
    """[responses, length]: rewards of the turns before that of each token."""
    probability: Tensor
    """[responses], under the case's engine."""
    prefixes: Tensor
    """[responses, length]: the row of the prefix before each token, over all cases."""
    tokens: Tensor
    """[responses, length]."""
    again: Tensor
    """[pairs, 3]: a response and two of its places with the same prefix, behind new contexts."""
    policy: Tensor
    """[prefixes, vocabulary]: the probabilities of the policy; 0 for tokens that a world lacks."""
    case_of_prefix: Tensor
    """[prefixes]."""
    case_of_response: Tensor
    """[responses]."""
    situation: Tensor
    """[cases], index into SITUATIONS."""
    exact: dict[tuple[str, str], Tensor]
    """(truth, level) -> its gradient [prefixes, vocabulary]."""

    def expected(self, slopes: Tensor) -> Tensor:
        """[prefixes, vocabulary]: minus the expected gradient of a loss with these derivatives by the logprobs
        [responses, length]."""
        weight = torch.where(self.response_mask, -self.probability[:, None] * slopes, 0.0).flatten()
        rows, chosen = self.prefixes.flatten(), self.tokens.flatten()
        gradient = torch.zeros_like(self.policy).index_put((rows, chosen), weight, accumulate=True)
        return gradient.index_add(0, rows, -weight[:, None] * self.policy[rows])

    def variance(self, slopes: Tensor) -> Tensor:
        """[cases]: trace of the covariance of the gradient that one sampled response gives."""
        policy = self.policy[self.prefixes]
        chosen, size = policy.gather(-1, self.tokens[..., None])[..., 0], (policy**2).sum(-1)
        squared = torch.where(self.response_mask, slopes**2 * (1 - 2 * chosen + size), 0.0).sum(-1)
        response, first, second = self.again.unbind(-1)  # tokens on one row are not orthogonal
        one, other = (response, first), (response, second)
        inner = (self.tokens[one] == self.tokens[other]).double() - chosen[one] - chosen[other] + size[one]
        squared = squared.index_add(0, response, 2 * slopes[one] * slopes[other] * inner)
        mean_square = self._by_case(self.probability * squared, self.case_of_response)
        return mean_square - self.inner(self.expected(slopes), self.expected(slopes))

    def inner(self, one: Tensor, other: Tensor) -> Tensor:
        """[cases]: inner product of two tables of gradients."""
        return self._by_case((one * other).sum(-1), self.case_of_prefix)

    def relative_error(self, gradient: Tensor, exact: Tensor) -> Tensor:
        """[cases]: norm of the difference over that of the exact one; where that is 0, the norm itself."""
        size = self.inner(exact, exact).sqrt()
        difference = self.inner(gradient - exact, gradient - exact).sqrt()
        return difference / torch.where(size > 1e-12, size, 1.0)

    def cosine(self, gradient: Tensor, exact: Tensor) -> Tensor:
        """[cases]: of the angle between two gradients; 1 where both are 0, 0 where one is."""
        sizes = (self.inner(gradient, gradient) * self.inner(exact, exact)).sqrt()
        both = (self.inner(gradient, gradient) < 1e-24) & (self.inner(exact, exact) < 1e-24)
        inner = self.inner(gradient, exact) / torch.where(sizes > 1e-24, sizes, 1.0)
        return torch.where(both, 1.0, torch.where(sizes > 1e-24, inner, 0.0))

    def _by_case(self, values: Tensor, case: Tensor) -> Tensor:
        return values.new_zeros(len(self.situation)).index_add(0, case, values)


def draw_cases(*, turns: bool, engine: bool = False) -> Iterator[Case]:
    """Every size, seed and situation. The policies differ by a few tenths of a nat a token, so that a clip acts at
    times. `engine`: responses are drawn by an engine that differs from the sampler."""
    for seed in SEEDS:
        for vocabulary, length in SIZES_OF_TURNS if turns else SIZES:
            generator = torch.Generator().manual_seed(1000 * seed + 10 * vocabulary + length)
            world = enumerate_world(vocabulary, length, generator, turns=turns)
            sampler = world.policy(generator)
            policies = {"on_policy": sampler, "off_policy": sampler + world.policy(generator, spread=0.5)}
            references = {"sampler": sampler, "apart": sampler + world.policy(generator, spread=0.5)}
            drawn_by = sampler + world.policy(generator, spread=0.3) if engine else sampler
            for index, (policy, reference) in enumerate(SITUATIONS):
                yield Case(world, policies[policy], sampler, references[reference], drawn_by, index)


def enumerated_cases(*, turns: bool = False, engine: bool = False) -> Cases:
    """The batch that certificates are made on; the same at every call. `turns`: of worlds of several turns; `engine`:
    drawn by an engine that differs from the sampler."""
    cases = list(draw_cases(turns=turns, engine=engine))
    longest, widest = max(case.world.length for case in cases), max(case.world.vocabulary for case in cases)
    starts = torch.tensor([0] + [case.world.num_prefixes for case in cases]).cumsum(0)

    def tokenwise(values: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(value, (0, longest - value.shape[-1])) for value in values])

    def rowwise(values: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(value, (0, widest - value.shape[-1])) for value in values])

    probabilities = [response_probabilities(case.world, case.engine) for case in cases]
    centred = [
        case.world.rewards - chance @ case.world.rewards for case, chance in zip(cases, probabilities, strict=True)
    ]
    exact = [exact_gradients(case) for case in cases]
    numbers = torch.arange(len(cases))
    response_mask = tokenwise([case.world.response_mask for case in cases])
    prefixes = tokenwise([case.world.prefixes + start for case, start in zip(cases, starts[:-1], strict=True)])
    same = (prefixes[:, :, None] == prefixes[:, None]) & response_mask[:, :, None] & response_mask[:, None]
    return Cases(
        logprobs=tokenwise([case.world.logprobs(case.policy) for case in cases]),
        old_logprobs=tokenwise([case.world.logprobs(case.sampler) for case in cases]),
        ref_logprobs=tokenwise([case.world.logprobs(case.reference) for case in cases]),
        rollout_logprobs=tokenwise([case.world.logprobs(case.engine) for case in cases]),
        entropy=tokenwise([entropies(case.policy)[case.world.prefixes] for case in cases]),
        response_mask=response_mask,
        rewards=torch.cat([case.world.rewards for case in cases]),
        centred=torch.cat(centred),
        earlier=tokenwise([case.world.earlier for case in cases]),
        probability=torch.cat(probabilities),
        prefixes=prefixes,
        tokens=tokenwise([case.world.tokens for case in cases]),
        again=same.triu(diagonal=1).nonzero(),
        policy=rowwise([torch.softmax(case.policy, -1) for case in cases]),
        case_of_prefix=numbers.repeat_interleave(starts.diff()),
        case_of_response=numbers.repeat_interleave(torch.tensor([len(case.world.rewards) for case in cases])),
        situation=torch.tensor([case.situation for case in cases]),
        exact={key: rowwise([gradients[key] for gradients in exact]) for key in exact[0]},
    )


def entropies(table: Tensor) -> Tensor:
    """[prefixes], nats."""
    logprobs = torch.log_softmax(table, -1)
    return -(logprobs.exp() * logprobs).sum(-1)


def exact_gradients(case: Case) -> dict[tuple[str, str], Tensor]:
    """(truth, level) -> the gradient of the expected reward, or of either divergence, by the policy's table."""
    table = case.policy.clone().requires_grad_()

    def total(level: str, *, forward: bool, kl_coef: float) -> Tensor:
        if level == "sequence":
            return sequence_objective(case.world, table, case.reference, forward=forward, kl_coef=kl_coef)
        return token_objective(case.world, table, case.engine, case.reference, forward=forward, kl_coef=kl_coef)

    gradients = {}
    for level in ("token", "sequence"):
        (reward,) = torch.autograd.grad(total(level, forward=False, kl_coef=0.0), table)
        gradients["reward", level] = reward
        for truth in ("reverse", "forward"):
            (regularized,) = torch.autograd.grad(total(level, forward=truth == "forward", kl_coef=1.0), table)
            gradients[truth, level] = reward - regularized
    return gradients
