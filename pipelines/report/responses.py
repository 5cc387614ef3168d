"""Choice of responses from training's last steps, with their tokens: the best, the worst, and those that the updates
changed most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.home.home import Home
from pipelines.report.evidence import Run
from pipelines.report.tokens import (
    COLUMNS,
    TURN_COLUMNS,
    ShownToken,
    ShownTurn,
    advantage_class,
    conversation,
    shown_tokens,
    tokenizer_of,
)
from storage import Store

MOST_TOKENS = 400
"""Largest number of tokens that are shown of a response."""
MOST_CHARACTERS = 2000
"""Largest number of characters that are shown of a prompt."""
_Key = tuple[str, int, int]
"""run, step, rollout"""
_MOST_STEPS = 10
"""Number of last steps, over all runs, from whose responses the selection is made."""
_EACH = 2
_CHOICES = {"best": "Highest reward", "worst": "Lowest reward", "moved": "Most changed by their step's updates"}
"""Kinds of chosen responses. Among best responses with equal rewards, the one whose group did worse is first; among
worst ones, the one whose group did better. A group appears once in each kind."""
_FIRST_STEPS = """
    WITH steps AS (SELECT DISTINCT run_id, step FROM rollouts WHERE list_contains(?, run_id)),
    last AS (FROM steps QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step DESC) <= ?)
    SELECT run_id, min(step) FROM last GROUP BY run_id
"""
_CHOSEN = """
    WITH recent AS (
        SELECT run_id, step, rollout_id, group_id, reward, advantage, num_tokens, finish_reason
        FROM rollouts JOIN (SELECT unnest($runs) AS run_id, unnest($firsts) AS first) USING (run_id)
        WHERE list_contains($runs, run_id) AND step >= $earliest AND step >= first
    ),
    trained AS (
        SELECT run_id, step, rollout_id, avg(abs(logprob - old_logprob)) AS movement, avg(clipped::INT) AS clipped
        FROM tokens SEMI JOIN recent USING (run_id, step, rollout_id)
        WHERE list_contains($runs, run_id) AND step >= $earliest AND sampled GROUP BY ALL
    ),
    ranked AS (
        SELECT *,
               row_number() OVER (siblings ORDER BY reward DESC, rollout_id) AS best_of_group,
               row_number() OVER (siblings ORDER BY reward, rollout_id) AS worst_of_group,
               row_number() OVER (siblings ORDER BY movement DESC, rollout_id) AS moved_of_group
        FROM recent LEFT JOIN trained USING (run_id, step, rollout_id)
        WINDOW siblings AS (PARTITION BY run_id, step, group_id)
    )
    SELECT *,
           row_number() OVER (ORDER BY best_of_group, reward DESC, advantage DESC, run_id, step, group_id) AS best,
           row_number() OVER (ORDER BY worst_of_group, reward, advantage, run_id, step, group_id) AS worst,
           row_number() OVER (ORDER BY movement IS NULL, moved_of_group, movement DESC, run_id, step) AS moved
    FROM ranked QUALIFY least(best, worst, moved) <= $each
"""
# The texts are read separately, only for the chosen: those of all responses may be gigabytes.
_TEXTS = """
    SELECT run_id, step, rollout_id, prompt, response FROM rollouts
    SEMI JOIN (SELECT unnest($runs) AS run_id, unnest($steps) AS step, unnest($rollouts) AS rollout_id)
    USING (run_id, step, rollout_id)
    WHERE list_contains($runs, run_id) AND list_contains($steps, step)
"""
_TOKENS = f"""
    SELECT run_id, step, rollout_id, {COLUMNS} FROM tokens
    SEMI JOIN (SELECT unnest($runs) AS run_id, unnest($steps) AS step, unnest($rollouts) AS rollout_id)
    USING (run_id, step, rollout_id)
    WHERE list_contains($runs, run_id) AND list_contains($steps, step) AND position < $most
    ORDER BY run_id, step, rollout_id, position
"""
_TURNS = f"""
    SELECT run_id, step, rollout_id, {TURN_COLUMNS} FROM turns
    SEMI JOIN (SELECT unnest($runs) AS run_id, unnest($steps) AS step, unnest($rollouts) AS rollout_id)
    USING (run_id, step, rollout_id)
    WHERE list_contains($runs, run_id) AND list_contains($steps, step)
    ORDER BY run_id, step, rollout_id, turn
"""


@dataclass(frozen=True, slots=True)
class ShownResponse:
    """One response of training, with its first tokens."""

    run: str
    step: int
    prompt: str
    response: str
    """The response's text as decoded when it was sampled. It is shown if no tokens are recorded."""
    reward: float
    advantage: float
    num_tokens: int
    cut_off: bool
    movement: float | None
    """Mean of |log(policy / policy before the step)| over the response's tokens, nats; None if no token was trained
    on."""
    clipped: float | None
    """Share of the response's tokens on which the clip acted."""
    tokens: Sequence[ShownToken]
    more_tokens: int
    """Number of tokens that are not shown."""
    turns: Sequence[ShownTurn]
    """The response's turns; empty in an environment with a single turn."""

    @property
    def advantage_class(self) -> str:
        """Returns the class of the style sheet that the response's tokens share."""
        return advantage_class(self.advantage)


@dataclass(frozen=True, slots=True)
class ChosenResponses:
    """Chosen responses of one kind, by heading."""

    heading: str
    responses: list[ShownResponse]


def trained_responses(store: Store, home: Home, runs: Sequence[Run]) -> list[ChosenResponses]:
    """Returns the best, the worst and the most changed responses of the runs' last steps; empty without recorded
    rollouts."""
    firsts = dict(store.query(_FIRST_STEPS, [[run.run_id for run in runs], max(1, _MOST_STEPS // len(runs))]).rows)
    if not firsts:
        return []
    last = {"runs": [*firsts], "firsts": [*firsts.values()], "earliest": min(firsts.values())}
    chosen = store.query(_CHOSEN, last | {"each": _EACH}).table.to_pylist()
    keys = [_key(row) for row in chosen]
    asked = dict(zip(("runs", "steps", "rollouts"), map(list, zip(*keys, strict=True)), strict=True))
    texts = {_key(row): row for row in store.query(_TEXTS, asked).table.to_pylist()}
    tokens: dict[_Key, list[dict[str, Any]]] = {key: [] for key in keys}
    for row in store.query(_TOKENS, {**asked, "most": MOST_TOKENS}).table.to_pylist():
        tokens[_key(row)].append(row)
    turns: dict[_Key, list[dict[str, Any]]] = {key: [] for key in keys}
    for row in store.query(_TURNS, asked).table.to_pylist():
        turns[_key(row)].append(row)
    names = {run.run_id: run.name or run.run_id for run in runs}
    shown = {
        key: _shown(home, row | texts[key], names, tokens[key], turns[key])
        for key, row in zip(keys, chosen, strict=True)
    }
    return [
        ChosenResponses(heading, [shown[key] for _, key in sorted(ranked)])
        for choice, heading in _CHOICES.items()
        if (ranked := [(row[choice], key) for row, key in zip(chosen, keys, strict=True) if _has_place(row, choice)])
    ]


def _key(row: Mapping[str, Any]) -> _Key:
    return row["run_id"], row["step"], row["rollout_id"]


def _has_place(row: Mapping[str, Any], choice: str) -> bool:
    return row[choice] <= _EACH and bool(choice != "moved" or row["movement"])


def _shown(
    home: Home,
    row: Mapping[str, Any],
    names: Mapping[str, str],
    tokens: Sequence[Mapping[str, Any]],
    turns: Sequence[Mapping[str, Any]],
) -> ShownResponse:
    sampled = sum(token["sampled"] for token in tokens)
    shown = shown_tokens(tokens, tokenizer_of(home, row["run_id"]))
    return ShownResponse(
        run=names[row["run_id"]],
        step=row["step"],
        prompt=row["prompt"],
        response=row["response"],
        reward=row["reward"],
        advantage=row["advantage"],
        num_tokens=row["num_tokens"],
        cut_off=row["finish_reason"] == "length",
        movement=row["movement"],
        clipped=row["clipped"],
        tokens=shown,
        more_tokens=row["num_tokens"] - sampled if len(tokens) == MOST_TOKENS else 0,
        turns=conversation(turns, shown),
    )
