"""Where things of the checkout are, for tests in any of its directories."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
TESTS = ROOT / "tests"
PACKAGES = TESTS / "packages"
"""Packages that extend the product, as a user would install them."""
SHARED = ROOT.parent / "shared"
"""Data sets beside the checkout, which a test that wants them skips without."""
