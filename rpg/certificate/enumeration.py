"""Small autoregressive policies whose every response can be listed: the ground truth that objectives are held against.

A policy is a table of logits, one row for each prefix that it goes on from. Token 0 ends a response; so does the length
limit. In a world of several turns token 1 ends a turn: the environment gives a token, drawn with chances of its own,
and rewards the turn. A 0 that is given goes on from what was said. The other given token is a whole new context, behind
which the policy sees nothing of what was before, as where an agent writes its history anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """Every response over a vocabulary up to a length, and a reward for each."""

    vocabulary: int
    length: int
    prefixes: Tensor
    """[responses, length], int64: the row of the prefix before each token; 0 on padding and on given tokens."""
    tokens: Tensor
    """[responses, length], int64; 0 on padding too."""
    response_mask: Tensor
    """[responses, length], bool: what the policy sampled."""
    rewards: Tensor
    """[responses], float64; with those of the turns."""
    earlier: Tensor
    """[responses, length], float64: rewards of the turns before that of each token."""
    chance: Tensor
    """[responses], float64: probability of what was given, after what was sampled; 1 where nothing was given."""
    num_prefixes: int

    def logprobs(self, table: Tensor) -> Tensor:
        """[responses, length]: log pi(y_t | y_<t) under the policy of this table of logits [prefixes, vocabulary]; 0
        on padding and on given tokens."""
        chosen = torch.log_softmax(table, -1)[self.prefixes, self.tokens]
        return torch.where(self.response_mask, chosen, 0.0)

    def policy(self, generator: torch.Generator, *, spread: float = 1.0) -> Tensor:
        """A random table of logits [prefixes, vocabulary], float64."""
        shape = (self.num_prefixes, self.vocabulary)
        return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class _Response:
    """A response as it is listed."""

    tokens: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    earlier: tuple[float, ...] = ()
    turn_rewards: float = 0.0
    chance: float = 1.0

    def context(self, position: int) -> tuple[int, ...]:
        """What the policy sees before a token: from the last new context on, else from the prompt, which is -1."""
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
    """All responses: those that end with token 0 within the length, and those cut at it. Rewards are standard
    normal.

    Args:
        turns: whether token 1 ends a turn, where there is room for a given token and one more. One of two tokens is
            given then, 0 or the last: a 0 that is given ends nothing, and the last is a new context.
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
    """All whole responses that go on from one, those that end soonest first where nothing is given."""
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
    """[responses], summing to 1."""
    return world.logprobs(table).sum(-1).exp() * world.chance


def sequence_objective(world: World, policy: Tensor, reference: Tensor, *, forward: bool, kl_coef: float) -> Tensor:
    """E_pi[R] - beta D over whole responses, a differentiable scalar."""
    log_pi, log_ref = world.logprobs(policy).sum(-1), world.logprobs(reference).sum(-1)
    divergence = (log_ref.exp() * (log_ref - log_pi)) if forward else (log_pi.exp() * (log_pi - log_ref))
    return (world.chance * (log_pi.exp() * world.rewards - kl_coef * divergence)).sum()


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
