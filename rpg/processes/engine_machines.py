"""Engines on machines without ranks: what a launcher tells the ranks and the engines of them."""

import os

KEY = "RPG_ENGINE_KEY"
"""Environment variable with the word by which the ranks and the engines of one launch know each other. It is set where
the engines are on other machines than the ranks, and there alone."""


def engines_elsewhere() -> bool:
    """Whether the engines of this process's launch are on machines without ranks."""
    return KEY in os.environ
