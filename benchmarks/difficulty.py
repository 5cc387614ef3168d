"""Tokens that each arm of specs/experiments/difficulty.yaml samples up to an accuracy: `difficulty.py HOME [ACCURACY]`.

What dynamic sampling throws away counts. The accuracy is interpolated between two evaluations.
"""

import sys
from itertools import pairwise

from storage import open_record

_TOKENS = """
    select step, sum(value) over (order by step) as tokens from (
        select step, sum(num_tokens) as value from rollouts where run_id = ? group by step
        union all
        select step, value from metrics
        where run_id = ? and name in ('dynamic_sampling/dropped_tokens', 'dynamic_sampling/surplus_tokens'))
    order by step
"""
_ACCURACY = """
    select step, avg(value) as accuracy from evaluations where run_id = ? and metric like 'mean@%' group by step
    order by step
"""


def main(home: str, wanted: float) -> None:
    """Prints a line for each run."""
    record = open_record(home)
    runs = record.sql("select run_id, name from runs where experiment = 'difficulty' order by name, run_id").rows
    for run_id, name in runs:
        tokens = {0: 0.0, **dict(record.sql(_TOKENS, [run_id, run_id]).rows)}
        measured = record.sql(_ACCURACY, [run_id]).rows
        print(f"{name:32}{_reached(measured, tokens, wanted)}; {measured[-1][1]:.1%} after {max(tokens)} steps")


def _reached(measured: list[tuple[int, float]], tokens: dict[int, float], wanted: float) -> str:
    for (before, low), (after, high) in pairwise(measured):
        if high >= wanted:
            share = (wanted - low) / (high - low) if high > low else 0.0
            spent = tokens[before] + max(0.0, share) * (tokens[after] - tokens[before])
            return f"{spent:9,.0f} tokens to {wanted:.0%}"
    return f"never {wanted:.0%}"


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.6)
