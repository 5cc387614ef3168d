"""Half-widths, in standard errors, for one interval, for several against one arm, and for all pairs of arms."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@cache
def student(freedom: float, confidence: float) -> float:
    """Returns the half-width, in standard errors, of the central interval of Student's t."""
    from scipy import special  # `scipy.stats` has the same values and takes a third of a second to import

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


@cache
def dunnett(count: int, freedom: float, confidence: float) -> float:
    """Returns the half-width, in standard errors, of `count` simultaneous intervals against one common arm.

    Each standardised difference is (z_i - z_0) / (sqrt(2) s), where z_0 belongs to the common arm and s^2 is chi-square
    over its degrees of freedom; given both, the arms are independent. The two integrals are by Gauss's quadrature, a
    thousand times as fast as `scipy.stats.multivariate_t` and as good as its four digits.
    Source: Dunnett 1955, A Multiple Comparison Procedure for Comparing Several Treatments with a Control.
    """
    if count == 1:
        return student(freedom, confidence)
    from scipy import optimize, special

    (common, of_common), (scale, of_scale) = _normal(), _deviation(freedom)

    def uncovered(factor: float) -> float:
        reach = math.sqrt(2) * factor * scale[:, None]
        inside = (special.ndtr(common + reach) - special.ndtr(common - reach)) ** count
        return float(of_scale @ inside @ of_common) - confidence

    return float(optimize.brentq(uncovered, *_ends(count, freedom, confidence), xtol=1e-6))


@cache
def tukey(arms: int, freedom: float, confidence: float) -> float:
    """Returns the half-width, in standard errors, of the simultaneous intervals of all pairs of arms.

    A pair's standardised difference is (z_i - z_j) / (sqrt(2) s): all intervals hold if the range of the z is within
    sqrt(2) s times the factor. Given s and the largest z, the other arms are independent.
    Source: Tukey 1953; Kramer 1956 for unequal numbers of seeds; Games and Howell 1976 for a freedom of each pair.

    Example: the upper 5 % point of the studentized range of 3 arms with 10 degrees of freedom is 3.877.
        >>> round(tukey(3, 10, 0.95) * math.sqrt(2), 3)
        3.877
    """
    if arms == 2:
        return student(freedom, confidence)
    from scipy import optimize, special

    (largest, of_largest), (scale, of_scale) = _normal(), _deviation(freedom)

    def uncovered(factor: float) -> float:
        reach = math.sqrt(2) * factor * scale[:, None]
        inside = arms * (special.ndtr(largest) - special.ndtr(largest - reach)) ** (arms - 1)
        return float(of_scale @ inside @ of_largest) - confidence

    return float(optimize.brentq(uncovered, *_ends(arms * (arms - 1) // 2, freedom, confidence), xtol=1e-6))


def _normal() -> tuple[Values, Values]:
    """Returns nodes and weights of Gauss's quadrature under the standard normal density."""
    places, weights = np.polynomial.hermite_e.hermegauss(64)
    return places, weights / weights.sum()


def _deviation(freedom: float) -> tuple[Values, Values]:
    """Returns nodes and weights of Gauss's quadrature for an estimated standard deviation whose true value is 1."""
    if not math.isfinite(freedom):
        return np.ones(1), np.ones(1)
    from scipy import special

    places, weights = np.polynomial.legendre.leggauss(128)
    return np.sqrt(2 * special.gammaincinv(freedom / 2, (places + 1) / 2) / freedom), weights / 2


def _ends(count: int, freedom: float, confidence: float) -> tuple[float, float]:
    """Returns a lower and an upper bound of the factor for `count` simultaneous intervals; the upper one is
    Bonferroni's."""
    return student(freedom, confidence), 1.01 * student(freedom, 1 - (1 - confidence) / count)
