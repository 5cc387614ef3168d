"""Reduction of the frequency of a process's garbage collections."""

import gc


def collect_rarely() -> None:
    """Makes the garbage collector run at every hundred thousand new objects instead of every thousand. Objects that
    imports make stay alive, and repeated scans of them took a fifth of the import time."""
    gc.set_threshold(100_000)
