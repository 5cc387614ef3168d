"""The results of `rpg doctor --gpu` as a table: a line for each check, and one for each rank on which it failed."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from pipelines.doctor.gpu_checks.catalogue import CHECKS
from pipelines.doctor.gpu_checks.check import Figures, Result

_SIGNS = {"ok": "ok     ", "failed": "FAILED ", "skipped": "skipped"}
_REMEDIES = {check.name: check.remedy for check in CHECKS}


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields the lines check by check. Figures are ranges over the check's ranks."""
    for name, group in groupby(results, key=lambda result: result.check):
        of_check = list(group)
        failed = [result for result in of_check if result.status == "failed"]
        passed = [result for result in of_check if result.status == "ok"]
        if failed:
            for result in failed:
                where = f"rank {result.rank}, {result.host or 'host unknown'}"
                yield f"{_SIGNS['failed']} {name:<17} {where}: {result.message}"
            yield f"{'':<25} remedy: {_REMEDIES[name]}"
        elif passed:
            seconds = max(result.seconds for result in passed)
            yield f"{_SIGNS['ok']} {name:<17} {seconds:4.0f} s  {_ranges([result.figures for result in passed])}"
        else:
            yield f"{_SIGNS['skipped']} {name:<17} {of_check[0].message}"


def _ranges(figures: Sequence[Figures]) -> str:
    """Returns each figure with its name and its range over the ranks."""
    texts = []
    for name in figures[0]:
        values = [each[name] for each in figures if name in each]
        numbers = sorted(value for value in values if not isinstance(value, str))
        if numbers:
            low, high = f"{numbers[0]:.3g}", f"{numbers[-1]:.3g}"
            texts.append(f"{name} {low}" + (f" to {high}" if high != low else ""))
        else:
            texts.append(f"{name} {', '.join(sorted(set(map(str, values))))}")
    return ", ".join(texts)
