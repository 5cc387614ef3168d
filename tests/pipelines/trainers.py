"""Finding the trainer among processes."""

from collections.abc import Iterable

import psutil


def trainers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the training processes; one that ends during the check is left out."""
    ranks = []
    for process in processes:
        try:
            if "rpg.train" in " ".join(process.cmdline()).split():  # the title of a fork is one word
                ranks.append(process)
        except psutil.Error:
            continue
    return ranks
