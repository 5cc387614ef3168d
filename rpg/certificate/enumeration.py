"""Enumerates every response of small autoregressive policies: the ground truth for checking objectives.

A policy is a table of logits with one row per prefix. Token 0 ends a response; so does the length limit. In a world
with several turns token 1 ends a turn: the environment gives a token, drawn with its own probabilities, and rewards the
turn. A given 0 continues the response. The other given token is a whole new context: from there on the policy sees
nothing that came before, as when an agent rewrites its history.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from specs.schema.base_objective import Direction


@dataclass(frozen=True, slots=True)
class World:
    """The responses over a vocabulary up to a length, with a reward for each."""

    vocabulary: int
    length: int
    prefixes: Tensor
    """Row of the prefix before each token; 0 on padding and on given tokens. [responses, length], int64"""
    tokens: Tensor
    """Tokens of each response; also 0 on padding. [responses, length], int64"""
    response_mask: Tensor
    """Whether the policy sampled each token. [responses, length], bool"""
    rewards: Tensor
    """Reward of each response, including the rewards of its turns. [responses], float64"""
    earlier: Tensor
    """For each token, the sum of the rewards of earlier turns. [responses, length], float64"""
    chance: Tensor
    """Probability of the given tokens, conditional on the sampled ones; 1 without given tokens. [responses], float64"""
    num_prefixes: int

    def logprobs(self, table: Tensor) -> Tensor:
        """Returns log pi(y_t | y_<t) under the policy with this table of logits [prefixes, vocabulary]; 0 on padding
        and on given tokens. [responses, length]"""
        chosen = torch.log_softmax(table, -1)[self.prefixes, self.tokens]
        return torch.where(self.response_mask, chosen, 0.0)

    def policy(self, generator: torch.Generator, *, spread: float = 1.0) -> Tensor:
        """Returns a random table of logits. [prefixes, vocabulary], float64"""
        shape = (self.num_prefixes, self.vocabulary)
        return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class _Response:
    """A response during enumeration."""

    tokens: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    earlier: tuple[float, ...] = ()
    turn_rewards: float = 0.0
    chance: float = 1.0

    def context(self, position: int) -> tuple[int, ...]:
        """Returns the tokens that the policy sees before a token: from the last new context on, else from the prompt,
        encoded as -1."""
        for place in reversed(range(position)):
            if not self.sampled[place] and self.tokens[place]:
                return self.tokens[place:position]
        return (-1, *self.tokens[:position])

    def sample(self, token: int) -> "_Response":
        return _Response(
            (*self.tokens, token),
            (*self.sampled, True),
            (*self.earlier, self.turn_rewards),
            self.turn_rewards,
            self.chance,
        )

    def give(self, token: int, *, chance: float, reward: float) -> "_Response":
        tokens, sampled, earlier = (*self.tokens, token), (*self.sampled, False), (*self.earlier, 0.0)
        return _Response(tokens, sampled, earlier, self.turn_rewards + reward, self.chance * chance)


def enumerate_world(vocabulary: int, length: int, generator: torch.Generator, *, turns: bool = False) -> World:
    """Returns all responses: those that end with token 0 within the length, and those that are cut at the length.

    Rewards are standard normal.

    Args:
        turns: whether token 1 ends a turn if a given token and one more still fit. The environment then gives 0 or the
            last token: a given 0 ends nothing, and the last token is a new context.
    """
    responses = list(_grown(_Response(), vocabulary, length, generator if turns else None))
    rows: dict[tuple[int, ...], int] = {}  # of contexts
    shape = (len(responses), length)
    prefixes, tokens = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask, earlier = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
    for index, response in enumerate(responses):
        for position, (token, sampled) in enumerate(zip(response.tokens, response.sampled, strict=True)):
            tokens[index, position] = token
            mask[index, position] = sampled
            if sampled:
                prefixes[index, position] = rows.setdefault(response.context(position), len(rows))
                earlier[index, position] = response.earlier[position]
    rewards = torch.randn(len(responses), generator=generator, dtype=torch.float64)
    rewards += torch.tensor([response.turn_rewards for response in responses], dtype=torch.float64)
    chance = torch.tensor([response.chance for response in responses], dtype=torch.float64)
    return World(vocabulary, length, prefixes, tokens, mask, rewards, earlier, chance, len(rows))


def _grown(response: _Response, vocabulary: int, length: int, given: torch.Generator | None) -> Iterator[_Response]:
    """Yields all whole responses that continue a partial one. Without given tokens, the shortest come first."""
    waiting = [response]
    cut: list[_Response] = []
    while waiting:
        ended = [each.sample(0) for each in waiting]
        yield from ended
        going_on = [each.sample(token) for each in waiting for token in range(1, vocabulary)]
        waiting = []
        for each in going_on:
            size = len(each.tokens)
            if size == length:
                cut.append(each)
            elif given and each.tokens[-1] == 1 and size + 1 < length:
                chance, *rewards = torch.rand(3, generator=given, dtype=torch.float64).tolist()
                answers = zip((0, vocabulary - 1), (chance, 1 - chance), rewards, strict=True)
                waiting += [each.give(token, chance=share, reward=reward) for token, share, reward in answers]
            else:
                waiting.append(each)
    yield from cut


def response_probabilities(world: World, table: Tensor) -> Tensor:
    """Returns the probability of each response; they sum to 1. [responses]"""
    return world.logprobs(table).sum(-1).exp() * world.chance


def sequence_objective(
    world: World, policy: Tensor, reference: Tensor, *, direction: Direction, kl_coef: float
) -> Tensor:
    """Returns E_pi[R] - beta D over whole responses, a differentiable scalar.

    The Jensen-Shannon divergence of a response is the expected sum of those of its tokens, in states of the policy: as
    either KL is, in states of its first argument.
    """
    log_pi, log_ref = world.logprobs(policy).sum(-1), world.logprobs(reference).sum(-1)
    match direction:
        case "forward":
            divergence = log_ref.exp() * (log_ref - log_pi)
        case "reverse":
            divergence = log_pi.exp() * (log_pi - log_ref)
        case "jensen_shannon":
            of_states = state_divergences(policy, reference, direction)[world.prefixes]
            divergence = log_pi.exp() * torch.where(world.response_mask, of_states, 0.0).sum(-1)
        case never:
            assert_never(never)
    return (world.chance * (log_pi.exp() * world.rewards - kl_coef * divergence)).sum()


def token_objective(
    world: World, policy: Tensor, sampler: Tensor, reference: Tensor, *, direction: Direction, kl_coef: float
) -> Tensor:
    """Returns the sum over t of E_{s ~ sampler}[E_{a ~ pi}[A(s, a)] - beta D(.|s)], a differentiable scalar.

    A(s, a) is the mean reward when the sampler completes the response after s, a.
    """
    visits, values = prefix_visits(world, sampler), action_values(world, sampler)
    reward = (torch.softmax(policy, -1) * values).sum(-1)
    return (visits * (reward - kl_coef * state_divergences(policy, reference, direction))).sum()


def state_divergences(policy: Tensor, reference: Tensor, direction: Direction) -> Tensor:
    """Returns the divergence between the next tokens of two policies after each prefix. [prefixes]"""
    log_pi, log_ref = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    match direction:
        case "forward":
            each = log_ref.exp() * (log_ref - log_pi)
        case "reverse":
            each = log_pi.exp() * (log_pi - log_ref)
        case "jensen_shannon":
            log_mean = torch.logaddexp(log_pi, log_ref) - math.log(2)
            each = (log_pi.exp() * (log_pi - log_mean) + log_ref.exp() * (log_ref - log_mean)) / 2
        case never:
            assert_never(never)
    return each.sum(-1)


def prefix_visits(world: World, sampler: Tensor) -> Tensor:
    """Returns the probability that the sampler visits each prefix. [prefixes]"""
    reached = response_probabilities(world, sampler)[:, None].expand_as(world.prefixes)[world.response_mask]
    return reached.new_zeros(world.num_prefixes).index_add(0, world.prefixes[world.response_mask], reached)


def action_values(world: World, sampler: Tensor) -> Tensor:
    """Returns the mean reward after each prefix and token if the sampler continues. [prefixes, vocabulary]"""
    probability = response_probabilities(world, sampler)
    place = (world.prefixes * world.vocabulary + world.tokens)[world.response_mask]
    empty = probability.new_zeros(world.num_prefixes * world.vocabulary)
    weight = probability[:, None].expand_as(world.prefixes)[world.response_mask]
    reward = (probability * world.rewards)[:, None].expand_as(world.prefixes)[world.response_mask]
    values = empty.index_add(0, place, reward) / empty.index_add(0, place, weight)
    return values.view(world.num_prefixes, world.vocabulary)
