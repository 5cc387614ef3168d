"""Enumerated worlds with their exact gradients. They are laid end to end, so that one call of a loss covers all of
them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from rpg.certificate.enumeration import (
    World,
    enumerate_world,
    response_probabilities,
    sequence_objective,
    token_objective,
)
from specs.schema.base_objective import Direction

SIZES = tuple((vocabulary, length) for vocabulary in (3, 4, 5) for length in (1, 2, 3, 4))
"""(Vocabulary, length) of the worlds."""
SIZES_OF_TURNS = tuple((vocabulary, length) for vocabulary in (3, 4) for length in (3, 4, 5))
"""(Vocabulary, length) of the worlds with several turns. Shorter responses have no room for a given token."""
FAR_SIZES, FAR_SIZES_OF_TURNS = ((3, 3), (4, 2)), ((3, 4),)
"""Sizes of the worlds in which policies are far apart."""
CUT_SIZES = ((3, 2), (3, 3), (4, 3), (3, 4))
"""(Vocabulary, length) of the worlds in which the sampler changes within a response."""
SPREAD, FAR_SPREAD = 0.5, 6.0
"""Standard deviations, in nats, of the differences between policies. In the worlds that are far apart, log-ratios of
tokens reach 20."""
ABSENT = -1e3
"""Logit of a token that a world lacks. The token's probability is then 0 in float64."""
SEEDS = (0, 1)
SITUATIONS = tuple((policy, reference) for policy in ("on_policy", "off_policy") for reference in ("sampler", "apart"))
"""Pairs: whether the policy is the sampler, and whether the reference is the sampler."""


@dataclass(frozen=True, slots=True)
class Case:
    """A world with its three policies."""

    world: World
    policy: Tensor
    sampler: Tensor
    reference: Tensor
    engine: Tensor
    """Policy that draws the responses: the sampler, or a separate engine's approximation of it."""
    situation: int
    """Index of the case's situation in SITUATIONS."""
    cut: int = 0
    """Number of tokens after which the sampler changes; 0 if it does not."""


@dataclass(frozen=True, slots=True)
class Cases:
    """The cases as one batch of responses and one table of prefixes."""

    logprobs: Tensor
    """Logprobs under the policy, nats; 0 on padding and on given tokens, also in the next two fields. [responses,
    length], float64"""
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    """Logprobs under the engine, nats. [responses, length]"""
    entropy: Tensor
    """Entropy of the policy before each token, nats. [responses, length]"""
    response_mask: Tensor
    """Whether each token was sampled. [responses, length], bool"""
    rewards: Tensor
    """Reward of each response, including the rewards of its turns. [responses]"""
    centred: Tensor
    """Rewards minus the case's mean under the engine. [responses]"""
    earlier: Tensor
    """For each token, the sum of the rewards of earlier turns. [responses, length]"""
    probability: Tensor
    """Probability of each response under the case's engine. [responses]"""
    prefixes: Tensor
    """Row of the prefix before each token, in the table of all cases. [responses, length]"""
    tokens: Tensor
    """Tokens of each response. [responses, length]"""
    again: Tensor
    """Prefixes that occur again after a new context: a response, and two of its positions with the same prefix. [pairs,
    3]"""
    policy: Tensor
    """Probabilities of the policy; 0 for tokens that a world lacks. [prefixes, vocabulary]"""
    logits: Tensor
    """Logits of the policy; ABSENT for tokens that a world lacks, also in the next field. [prefixes, vocabulary]"""
    ref_logits: Tensor
    """Logits of the reference. [prefixes, vocabulary]"""
    case_of_prefix: Tensor
    """Index of each prefix's case. [prefixes]"""
    case_of_response: Tensor
    """Index of each response's case. [responses]"""
    situation: Tensor
    """Index of each case's situation in SITUATIONS. [cases]"""
    cut: Tensor
    """Number of tokens after which each case's sampler changes; 0 if it does not. [cases]"""
    exact: dict[tuple[str, str], Tensor]
    """(truth, level) -> exact gradient. [prefixes, vocabulary]"""

    def gradients(self, slopes: Tensor, of_logits: Tensor | None = None) -> Tensor:
        """Returns the gradient of each token's loss with respect to the logits that predict it. [responses, length,
        vocabulary]

        Args:
            slopes: derivatives of the responses' losses by the logprobs. [responses, length]
            of_logits: those by the logits themselves, of losses that read whole distributions. [responses, length,
                vocabulary]
        """
        along = torch.zeros_like(self.policy[self.prefixes]).scatter(-1, self.tokens[..., None], 1.0)
        gradient = slopes[..., None] * (along - self.policy[self.prefixes])
        gradient = gradient if of_logits is None else gradient + of_logits
        return torch.where(self.response_mask[..., None], gradient, 0.0)

    def expected(self, gradients: Tensor) -> Tensor:
        """Returns minus the expected gradient of a loss; see `gradients`. [prefixes, vocabulary]"""
        weighted = -self.probability[:, None, None] * gradients
        return torch.zeros_like(self.policy).index_add(0, self.prefixes.flatten(), weighted.flatten(0, 1))

    def variance(self, gradients: Tensor) -> Tensor:
        """Returns the trace of the covariance of the gradient from one sampled response. [cases]"""
        squared = gradients.square().sum((-2, -1))
        response, first, second = self.again.unbind(-1)  # tokens of one row are not orthogonal
        inner = (gradients[response, first] * gradients[response, second]).sum(-1)
        squared = squared.index_add(0, response, 2 * inner)
        mean_square = self._by_case(self.probability * squared, self.case_of_response)
        return mean_square - self.inner(self.expected(gradients), self.expected(gradients))

    def inner(self, one: Tensor, other: Tensor) -> Tensor:
        """Returns the inner product of two tables of gradients. [cases]"""
        return self._by_case((one * other).sum(-1), self.case_of_prefix)

    def relative_error(self, gradient: Tensor, exact: Tensor) -> Tensor:
        """Returns the norm of the difference, divided by the norm of the exact gradient unless that is 0. [cases]"""
        size = self.inner(exact, exact).sqrt()
        difference = self.inner(gradient - exact, gradient - exact).sqrt()
        return difference / torch.where(size > 1e-12, size, 1.0)

    def cosine(self, gradient: Tensor, exact: Tensor) -> Tensor:
        """Returns the cosine of the angle between two gradients: 1 if both are 0, and 0 if only one is 0. [cases]"""
        sizes = (self.inner(gradient, gradient) * self.inner(exact, exact)).sqrt()
        both = (self.inner(gradient, gradient) < 1e-24) & (self.inner(exact, exact) < 1e-24)
        inner = self.inner(gradient, exact) / torch.where(sizes > 1e-24, sizes, 1.0)
        return torch.where(both, 1.0, torch.where(sizes > 1e-24, inner, 0.0))

    def short(self) -> "Cases":
        """Returns the cases with only those responses that end before the sampler changes."""
        ends_before = self.response_mask.sum(-1) <= self.cut[self.case_of_response]
        kept = self.probability * ends_before
        probability = kept / self._by_case(kept, self.case_of_response)[self.case_of_response]
        mean = self._by_case(probability * self.rewards, self.case_of_response)
        return replace(self, probability=probability, centred=self.rewards - mean[self.case_of_response])

    def mean_length(self) -> float:
        """Returns the expected number of tokens of a response, as the mean over the cases."""
        return self._by_case(self.probability * self.response_mask.sum(-1), self.case_of_response).mean().item()

    def _by_case(self, values: Tensor, case: Tensor) -> Tensor:
        return values.new_zeros(len(self.situation)).index_add(0, case, values)


def draw_cases(*, turns: bool, engine: bool = False, far: bool = False) -> Iterator[Case]:
    """Yields a case for every size, seed and situation.

    Args:
        turns: whether responses have several turns.
        engine: whether an engine that differs from the sampler draws the responses.
        far: whether the policies differ by many nats per token, which wide clips notice too. Otherwise they differ by a
            few tenths of a nat, as in training.
    """
    sizes, far_sizes = (SIZES_OF_TURNS, FAR_SIZES_OF_TURNS) if turns else (SIZES, FAR_SIZES)
    spread = FAR_SPREAD if far else SPREAD
    for seed in SEEDS:
        for vocabulary, length in far_sizes if far else sizes:
            generator = torch.Generator().manual_seed(1000 * seed + 10 * vocabulary + length)
            world = enumerate_world(vocabulary, length, generator, turns=turns)
            sampler = world.policy(generator)
            policies = {"on_policy": sampler, "off_policy": sampler + world.policy(generator, spread=spread)}
            references = {"sampler": sampler, "apart": sampler + world.policy(generator, spread=spread)}
            drawn_by = sampler + world.policy(generator, spread=0.3) if engine else sampler
            for index, (policy, reference) in enumerate(SITUATIONS):
                yield Case(world, policies[policy], sampler, references[reference], drawn_by, index)


def draw_cut_cases() -> Iterator[Case]:
    """Yields cases in which an older sampler draws a response's first tokens: one for every seed, situation and
    position of the change. In the first situations the policy is the newer sampler."""
    for seed in SEEDS:
        for vocabulary, length in CUT_SIZES:
            generator = torch.Generator().manual_seed(1000 * seed + 10 * vocabulary + length)
            world = enumerate_world(vocabulary, length, generator)
            positions = torch.zeros(world.num_prefixes, dtype=torch.long)
            positions[world.prefixes] = torch.arange(length).expand_as(world.prefixes) * world.response_mask
            newer = world.policy(generator)
            older = newer + world.policy(generator, spread=SPREAD)
            policies = {"on_policy": newer, "off_policy": newer + world.policy(generator, spread=SPREAD)}
            apart = newer + world.policy(generator, spread=SPREAD)
            for cut in range(1, length):
                sampler = torch.where((positions < cut)[:, None], older, newer)
                references = {"sampler": sampler, "apart": apart}
                for index, (policy, reference) in enumerate(SITUATIONS):
                    yield Case(world, policies[policy], sampler, references[reference], sampler, index, cut)


def enumerated_cases(*, turns: bool = False, engine: bool = False, far: bool = False, is_cut: bool = False) -> Cases:
    """Returns the batch on which certificates are computed, the same at every call. See `draw_cases`, and
    `draw_cut_cases` for `is_cut`."""
    cases = list(draw_cut_cases() if is_cut else draw_cases(turns=turns, engine=engine, far=far))
    longest, widest = max(case.world.length for case in cases), max(case.world.vocabulary for case in cases)
    starts = torch.tensor([0] + [case.world.num_prefixes for case in cases]).cumsum(0)

    def tokenwise(values: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(value, (0, longest - value.shape[-1])) for value in values])

    def rowwise(values: list[Tensor], absent: float = 0.0) -> Tensor:
        return torch.cat(
            [torch.nn.functional.pad(value, (0, widest - value.shape[-1]), value=absent) for value in values]
        )

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
        logits=rowwise([case.policy for case in cases], ABSENT),
        ref_logits=rowwise([case.reference for case in cases], ABSENT),
        case_of_prefix=numbers.repeat_interleave(starts.diff()),
        case_of_response=numbers.repeat_interleave(torch.tensor([len(case.world.rewards) for case in cases])),
        situation=torch.tensor([case.situation for case in cases]),
        cut=torch.tensor([case.cut for case in cases]),
        exact={key: rowwise([gradients[key] for gradients in exact]) for key in exact[0]},
    )


def entropies(table: Tensor) -> Tensor:
    """Returns the entropy of each row's policy, nats. [prefixes]"""
    logprobs = torch.log_softmax(table, -1)
    return -(logprobs.exp() * logprobs).sum(-1)


def exact_gradients(case: Case) -> dict[tuple[str, str], Tensor]:
    """Returns (truth, level) -> gradient of the expected reward, or of a divergence, with respect to the policy's
    table."""
    table = case.policy.clone().requires_grad_()

    def total(level: str, direction: Direction, kl_coef: float) -> Tensor:
        if level == "sequence":
            return sequence_objective(case.world, table, case.reference, direction=direction, kl_coef=kl_coef)
        return token_objective(case.world, table, case.engine, case.reference, direction=direction, kl_coef=kl_coef)

    gradients = {}
    for level in ("token", "sequence"):
        (reward,) = torch.autograd.grad(total(level, "reverse", 0.0), table)
        gradients["reward", level] = reward
        for truth in get_args(Direction):
            (regularized,) = torch.autograd.grad(total(level, truth, 1.0), table)
            gradients[truth, level] = reward - regularized
    return gradients
