"""Intervals for scores of seeds and problems: means, gains, and many arms compared with the first.

Scores are a table [seeds, problems], each entry the mean over one problem's samples; one seed may come as [problems].
The held-out problems are a sample of all problems and the seeds a sample of all seeds, so a mean varies with both. The
two-way table with one entry a cell estimates three parts of that variance:

    A   s^2 / S, s^2 the variance of the seeds' means
    B   the variance of the problems' means over P
    E   the residual mean square over S P, which A and B both contain

The mean's variance is V = max(A + B - E, A, B). B rests on many problems and A on few seeds, sometimes two. One factor
of Student's t for both is wrong: with the problems' an interval is too narrow, with the seeds' far too wide. The
half-width h has the problems' factor t_B for the whole of V. The larger factor t_A of the seeds is for a share of A:
all of it if A is most of V, little of it if A is residual noise or small beside B:

    h^2 = t_B^2 V + (t_A^2 - t_B^2) A^2 / (A + E + B / 4)

With one seed A is unknown. An interval then holds for these weights on new problems, and not for the weights of another
seed. `Interval.holds_for` states the scope, and `Interval.tells_from` is false.

Source: two-way random effects, Searle 1992, Variance Components, ch. 4; limits for sums of mean squares, each with a
factor of its own, Burdick and Graybill 1992, Confidence Intervals on Variance Components, ch. 3; many arms, Dunnett
1955. The share A / (A + E + B / 4) and the terms for rare successes were chosen by simulation: benchmarks/coverage.py.
"""

from rpg.statistics.comparison import Verdict, level, verdict
from rpg.statistics.intervals import arms_against_first, gain_interval, mean_interval, seed_difference, seed_mean
from rpg.statistics.variance import NEW_SEEDS, THESE_WEIGHTS, Interval, Spread, Table, spread_of

__all__ = [
    "NEW_SEEDS",
    "THESE_WEIGHTS",
    "Interval",
    "Spread",
    "Table",
    "Verdict",
    "arms_against_first",
    "gain_interval",
    "level",
    "mean_interval",
    "seed_difference",
    "seed_mean",
    "spread_of",
    "verdict",
]
