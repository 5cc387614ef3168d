"""Small autoregressive policies whose every response can be listed: the ground truth that objectives are held against.

A policy is a table of logits, one row for each unfinished prefix. Token 0 ends a response; so does the length limit.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """Every response over a vocabulary up to a length, and a reward for each."""

    vocabulary: int
    length: int
    prefixes: Tensor
    """[responses, length], int64: the row of the prefix before each token; 0 on padding."""
    tokens: Tensor
    """[responses, length], int64; 0 on padding too."""
    response_mask: Tensor
    """[responses, length], bool."""
    rewards: Tensor
    """[responses], float64."""
    num_prefixes: int

    def logprobs(self, table: Tensor) -> Tensor:
        """[responses, length]: log pi(y_t | y_<t) under the policy of this table of logits [prefixes, vocabulary]; 0
        on padding."""
        chosen = torch.log_softmax(table, -1)[self.prefixes, self.tokens]
        return torch.where(self.response_mask, chosen, 0.0)

    def policy(self, generator: torch.Generator, *, spread: float = 1.0) -> Tensor:
        """A random table of logits [prefixes, vocabulary], float64."""
        shape = (self.num_prefixes, self.vocabulary)
        return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def enumerate_world(vocabulary: int, length: int, generator: torch.Generator) -> World:
    """All responses: those that end with token 0 within the length, and those cut at it. Rewards are standard
    normal."""
    responses = [(*body, 0) for size in range(length) for body in product(range(1, vocabulary), repeat=size)] + list(
        product(range(1, vocabulary), repeat=length)
    )
    rows: dict[tuple[int, ...], int] = {}
    shape = (len(responses), length)
    prefixes, tokens = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    for index, response in enumerate(responses):
        for position, token in enumerate(response):
            prefixes[index, position] = rows.setdefault(response[:position], len(rows))
            tokens[index, position] = token
            mask[index, position] = True
    rewards = torch.randn(len(responses), generator=generator, dtype=torch.float64)
    return World(vocabulary, length, prefixes, tokens, mask, rewards, len(rows))


def response_probabilities(world: World, table: Tensor) -> Tensor:
    """[responses], summing to 1."""
    return world.logprobs(table).sum(-1).exp()


def sequence_objective(world: World, policy: Tensor, reference: Tensor, *, forward: bool, kl_coef: float) -> Tensor:
    """E_pi[R] - beta D over whole responses, a differentiable scalar."""
    log_pi, log_ref = world.logprobs(policy).sum(-1), world.logprobs(reference).sum(-1)
    divergence = (log_ref.exp() * (log_ref - log_pi)) if forward else (log_pi.exp() * (log_pi - log_ref))
    return (log_pi.exp() * world.rewards).sum() - kl_coef * divergence.sum()


def token_objective(
    world: World, policy: Tensor, sampler: Tensor, reference: Tensor, *, forward: bool, kl_coef: float
) -> Tensor:
    """Sum over t of E_{s ~ sampler}[E_{a ~ pi}[A(s, a)] - beta D(.|s)], a differentiable scalar.

    A(s, a) is the mean reward of responses that the sampler completes after s, a.
    """
    visits, values = prefix_visits(world, sampler), action_values(world, sampler)
    log_pi, log_ref = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    reward = (log_pi.exp() * values).sum(-1)
    divergence = (log_ref.exp() * (log_ref - log_pi)) if forward else (log_pi.exp() * (log_pi - log_ref))
    return (visits * (reward - kl_coef * divergence.sum(-1))).sum()


def prefix_visits(world: World, sampler: Tensor) -> Tensor:
    """[prefixes]: the probability that the sampler comes past each prefix."""
    reached = response_probabilities(world, sampler)[:, None].expand_as(world.prefixes)[world.response_mask]
    return reached.new_zeros(world.num_prefixes).index_add(0, world.prefixes[world.response_mask], reached)


def action_values(world: World, sampler: Tensor) -> Tensor:
    """[prefixes, vocabulary]: the mean reward after each prefix and token when the sampler goes on."""
    probability = response_probabilities(world, sampler)
    place = (world.prefixes * world.vocabulary + world.tokens)[world.response_mask]
    empty = probability.new_zeros(world.num_prefixes * world.vocabulary)
    weight = probability[:, None].expand_as(world.prefixes)[world.response_mask]
    reward = (probability * world.rewards)[:, None].expand_as(world.prefixes)[world.response_mask]
    values = empty.index_add(0, place, reward) / empty.index_add(0, place, weight)
    return values.view(world.num_prefixes, world.vocabulary)
