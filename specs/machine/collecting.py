"""How often a process looks for what only points at itself."""

import gc


def collect_rarely() -> None:
    """Has the garbage collector look at each hundred thousand new objects, not at each thousand. Imports make nothing
    but what lives on, and looking through it again and again took a fifth of their time."""
    gc.set_threshold(100_000)
