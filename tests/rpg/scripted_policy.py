"""A policy that follows a script: a sampler for tests of environments."""

from collections.abc import Callable, Sequence

from rpg.types import NextTurns, OnResponse, Rollout, Sampling, Turn, TurnRequest

Says = Callable[[tuple[int, ...]], list[int]]
"""Context -> the tokens of the next turn."""


class ScriptedPolicy:
    """Samples a token a step of every turn that is under way, as engines do; ends a turn where its script ends."""

    policy_version = 3

    def __init__(self, says: Says) -> None:
        self.says = says
        self.steps = 0
        """Decoding steps so far."""
        self.beside: list[int] = []
        """Turns under way at each step."""
        self.requests: list[TurnRequest] = []

    def serve(self, next_turns: NextTurns, *, sampling: Sampling, on_response: OnResponse) -> int:  # noqa: ARG002
        """See Sampler."""
        under_way: dict[int, list[int]] = {}
        since, ended = 0, False
        while True:
            pause = "idle" if not under_way else "steps" if since == 16 else "ended" if ended else None
            if pause:
                since, ended = (since if pause == "ended" else 0), False
                turns = next_turns(pause)
                if turns is None:
                    return sum(map(len, under_way.values()))
                for turn in turns:
                    under_way[len(self.requests)] = []
                    self.requests.append(turn)
                continue
            self.steps += 1
            since += 1
            self.beside.append(len(under_way))
            for number, said in list(under_way.items()):
                request = self.requests[number]
                whole = self.says(request.token_ids)
                said.append(whole[len(said)])
                if len(said) == len(whole) or len(said) == request.limit:
                    del under_way[number]
                    ended = True
                    reason = "stop" if len(said) == len(whole) else "length"
                    on_response(number, Rollout((Turn(tuple(said), _logprobs(said)),), reason))


def _logprobs(said: Sequence[int]) -> tuple[float, ...]:
    return tuple(-0.5 - token / 1000 for token in said)
