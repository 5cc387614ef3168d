"""Finding the trainer among processes."""

from collections.abc import Iterable

import psutil


def trainers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that train; one that ends while it is looked at is none."""
    ranks = []
    for process in processes:
        try:
            if "rpg.train" in " ".join(process.cmdline()).split():  # the title of a fork is one word
                ranks.append(process)
        except psutil.Error:
            continue
    return ranks
