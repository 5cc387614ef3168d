"""Writes the rows of one step: metrics, responses, tokens. Columns come directly from arrays, without objects per
token."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
from torch import Tensor

from rpg.batches.batch import StepRollouts
from rpg.recording.segments import SegmentWriter
from rpg.rewards.score import Score
from rpg.types import Problem
from specs.records import MetricRow, RolloutRow, TokenRow, TurnRow


def write_metrics(writer: SegmentWriter, step: int, metrics: Mapping[str, float]) -> None:
    """Writes one row per metric."""
    writer.columns(
        MetricRow,
        {"step": step, "name": list(metrics), "value": list(metrics.values()), "recorded_at": datetime.now(UTC)},
    )


def write_rollouts(
    writer: SegmentWriter,
    step: int,
    rollouts: StepRollouts,
    problems: Sequence[Problem],
    advantages: Tensor,
    *,
    trained_version: int,
    reference_version: int,
) -> None:
    """Writes one row per response that this rank holds. `problems` are all problems of the run; `advantages` has one
    value per row."""
    held, groups = rollouts.held, rollouts.group_ids[rollouts.held]
    asked = [problems[rollouts.problems[group]] for group in groups]
    scores = [rollouts.scores[response] for response in held]
    writer.columns(
        RolloutRow,
        {
            "step": step,
            "rollout_id": held,
            "prompt_id": [problem.problem_id for problem in asked],
            "group_id": groups,
            "prompt": [problem.prompt for problem in asked],
            "response": list(rollouts.responses),
            "reward": [score.reward for score in scores],
            "correct": [score.correct for score in scores],
            "advantage": advantages.double().numpy(),
            "num_tokens": rollouts.held_num_sampled,
            "finish_reason": [rollouts.finish_reasons[response] for response in held],
            "policy_version": rollouts.first_versions[held],
            "trained_version": trained_version,
            "reference_version": reference_version,
            "reward_error": [score.error for score in scores],
            "reward_terms": [_terms(score) for score in scores],
            "verdicts": [score.verdicts for score in scores],
        },
    )


def write_turns(writer: SegmentWriter, step: int, rollouts: StepRollouts) -> None:
    """Writes one row per turn of the responses that this rank holds."""
    turns = [
        (response, place, turn)
        for response, turns in zip(rollouts.held, rollouts.turns, strict=True)
        for place, turn in enumerate(turns)
    ]
    writer.columns(
        TurnRow,
        {
            "step": step,
            "rollout_id": [response for response, _, _ in turns],
            "turn": [place for _, place, _ in turns],
            "sampled": [turn.sampled for _, _, turn in turns],
            "tool": [turn.tool or None for _, _, turn in turns],
            "text": [turn.text for _, _, turn in turns],
            "num_tokens": [turn.num_tokens for _, _, turn in turns],
            "reward": [turn.reward for _, _, turn in turns],
            "restart": [turn.restart for _, _, turn in turns],
            "error": [turn.error or None for _, _, turn in turns],
            "seconds": [turn.seconds if turn.tool else None for _, _, turn in turns],
        },
    )


def _terms(score: Score) -> str | None:
    terms = {name: [value, score.weights[name]] for name, value in score.terms.items()}
    return json.dumps(terms) if terms else None


def chosen_responses(run_id: str, step: int, count: int, share: float) -> np.ndarray:
    """Returns whether the tokens of each of a step's responses are recorded, bool. [count]

    It chooses a share of the responses, rounded up: those with the smallest digests of run, step and number. So the
    choice is the same whenever the step is trained again, and independent of random states.
    """
    chosen = np.ones(count, dtype=np.bool_)
    if share < 1:
        digests = [hashlib.sha256(f"{run_id} {step} {number}".encode()).digest() for number in range(count)]
        chosen[sorted(range(count), key=digests.__getitem__)[math.ceil(share * count) :]] = False
    return chosen


def write_tokens(
    writer: SegmentWriter, step: int, rollouts: StepRollouts, ledger: Mapping[str, Tensor], chosen: np.ndarray
) -> None:
    """Writes one row per token of the chosen responses that this rank holds. Values that are missing in the token
    table, such as all values of given tokens, become NULL.

    Args:
        ledger: columns of the token table. [M] each
        chosen: whether to write each response's tokens, bool. [B]
    """
    lengths, sampled = rollouts.held_lengths, rollouts.sampled
    rollout_ids = np.repeat(rollouts.held.astype(np.int32), lengths)
    positions = np.arange(len(sampled)) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def known(values: np.ndarray) -> np.ndarray:
        """Returns [M] values of the sampled tokens as [N], with NaN at the given tokens."""
        if len(values) == len(sampled):
            return values
        spread = np.full(len(sampled), np.nan, dtype=np.float32)
        spread[sampled] = values
        return spread

    kept = chosen[rollout_ids]
    columns = {name: known(values.numpy())[kept] for name, values in ledger.items()}
    writer.columns(
        TokenRow,
        {
            "step": step,
            "rollout_id": rollout_ids[kept],
            "position": positions[kept].astype(np.int32),
            "token_id": rollouts.token_ids[kept].astype(np.int32),
            "logprob": pa.array(columns["logprobs"], from_pandas=True),
            "old_logprob": pa.array(columns["old_logprobs"], from_pandas=True),
            "rollout_logprob": pa.array(known(rollouts.rollout_logprobs)[kept], mask=~sampled[kept]),
            "ref_logprob": pa.array(columns["ref_logprobs"], from_pandas=True),
            "ratio": pa.array(columns["ratios"], from_pandas=True),
            "clipped": pa.array(columns["clipped"] > 0, mask=np.isnan(columns["clipped"])),
            "entropy": pa.array(columns["entropies"], from_pandas=True),
            "sampled": sampled[kept],
            "policy_version": pa.array(known(rollouts.token_versions)[kept], pa.int32(), from_pandas=True),
        },
    )
