"""The versions of an experiment: each set of resolved cells that was run under its name.

`rpg run FILE --set training.steps=100` gives the cells another resolved spec, so that its runs are a separate version;
other seeds of the same cells join the version that has them. NAME means the version that was run last, NAME@2 the
second one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.home.home import Home
from specs.errors import RpgError
from specs.machine.files import read_json, write_json

Record = Mapping[str, Any]
"""An experiment's record, experiment.json."""


class NoSuchVersionError(RpgError):
    """Error for a version number that the experiment does not have."""


@dataclass(frozen=True, slots=True)
class Version:
    """One set of cells, with all seeds that were run for it."""

    number: int
    """Number of the version, from 1, in the order in which versions were first run."""
    recipes: frozenset[str]
    """Recipe of each cell; see `RunPlan.recipe`."""
    runs: tuple[str, ...]
    """Ids of the version's runs."""
    looks: tuple[float, ...] = ()
    """Numbers of seeds at which the experiment's answer was reported; the mean over cells if they have unequal numbers.
    Each further report raises the chance of a false claim."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that `versions_in` reads."""
        plain = {"version": self.number, "recipes": sorted(self.recipes), "runs": list(self.runs)}
        return plain | ({"looks": list(self.looks)} if self.looks else {})


def versions_in(record: Record) -> list[Version]:
    """Returns the versions in an experiment's record. The one that was run last is at the end."""
    return [
        Version(entry["version"], frozenset(entry["recipes"]), tuple(entry["runs"]), tuple(entry.get("looks", ())))
        for entry in record.get("versions", ())
    ]


def with_runs(
    versions: Sequence[Version],
    recipes: Collection[str],
    runs: Sequence[str],
    *,
    in_addition: bool = False,
    last_number: int = 0,
) -> list[Version]:
    """Returns the versions after runs were executed, with theirs at the end.

    Args:
        recipes: recipes of the runs' cells.
        runs: ids in the order of the experiment's file, which the version keeps if it has no other runs.
        in_addition: the runs join the last version, whatever their cells are, as a study's trials do.
        last_number: the highest number ever used, if that version was deleted: the number is not used again.
    """
    wanted = frozenset(recipes)
    if in_addition and versions:
        version = versions[-1]
    else:
        known = [version for version in versions if version.recipes == wanted]
        number = max(last_number, *(version.number for version in versions), 0) + 1
        version = known[0] if known else Version(number, wanted, ())
    others = [other for other in versions if other.number != version.number]
    all_runs = runs if set(version.runs) <= set(runs) else dict.fromkeys([*version.runs, *runs])
    return [*others, replace(version, recipes=version.recipes | wanted, runs=tuple(all_runs))]


def merged_versions(there: Record, here: Record, newer: Record) -> list[Version]:
    """Merges the versions of an experiment's records in two homes, with that of the `newer` record at the end.

    Versions with the same cells become one, with the number from `there`.
    """
    both = [version for record in (there, here) for version in versions_in(record)]
    if not both:
        return []
    last = versions_in(newer)[-1]
    together: dict[frozenset[str], Version] = {}
    for version in both:
        known = together.get(version.recipes)
        taken = {other.number for other in together.values()}
        number = version.number if version.number not in taken else max(taken) + 1
        together[version.recipes] = Version(
            known.number if known else number,
            version.recipes,
            tuple(dict.fromkeys([*(known.runs if known else ()), *version.runs])),
            tuple(sorted({*(known.looks if known else ()), *version.looks})),
        )
    end = together.pop(last.recipes)
    return [*together.values(), end]


def split_name(text: str) -> tuple[str, int]:
    """Splits `sums@2` into ("sums", 2), and `sums` into ("sums", 0). `sums@0` is not split, so that it matches
    nothing."""
    name, _, number = text.rpartition("@")
    return (name, int(number)) if name and number.isdecimal() and int(number) else (text, 0)


def runs_of(home: Home, text: str) -> list[str]:
    """Returns the ids of the runs of an experiment's version, in its order; empty if there is no such experiment.

    Args:
        text: NAME, or NAME@VERSION.
    Raises:
        NoSuchVersionError: the experiment has no such version.
    """
    name, number = split_name(text)
    record = read_json(home.experiment(name) / "experiment.json")
    if not number:
        return list(record.get("current") or record.get("runs") or ())
    versions = versions_in(record)
    if not versions:
        return []
    for version in versions:
        if version.number == number:
            return list(version.runs)
    known = ", ".join(f"{name}@{version.number}" for version in sorted(versions, key=lambda one: one.number))
    raise NoSuchVersionError(f"there is no {text}; {name} has {known}")


def looks_of(home: Home, text: str) -> tuple[float, ...]:
    """Returns the numbers of seeds at which a version's answer was reported; empty if there is no such version.

    Args:
        text: NAME, the version that was run last, or NAME@VERSION.
    """
    name, number = split_name(text)
    versions = versions_in(read_json(home.experiment(name) / "experiment.json"))
    return next((version.looks for version in reversed(versions) if number in (0, version.number)), ())


def note_look(home: Home, text: str, num_seeds: float) -> None:
    """Records that the answer of an experiment's version was reported at a number of seeds. Ignores one seed, with
    which nothing is claimed.

    Args:
        text: NAME, the version that was run last, or NAME@VERSION.
    """
    name, number = split_name(text)
    if num_seeds < 2 or num_seeds in looks_of(home, text):
        return
    with home.locked(f"experiment-{name}", waiting=lambda: None):
        path = home.experiment(name) / "experiment.json"
        record = read_json(path)
        versions = versions_in(record)
        asked = {number or version.number for version in versions[-1:]}
        noted = [
            replace(version, looks=tuple(sorted({*version.looks, num_seeds}))) if version.number in asked else version
            for version in versions
        ]
        write_json(path, record | {"versions": [version.to_json() for version in noted]})


def is_experiment(home: Home, text: str) -> bool:
    """Returns whether NAME or NAME@VERSION names an experiment."""
    return (home.experiment(split_name(text)[0]) / "experiment.json").is_file()


def names_of_others(home: Home, text: str) -> list[str]:
    """Returns NAME@VERSION of the experiment's other versions, latest first."""
    name, number = split_name(text)
    versions = versions_in(read_json(home.experiment(name) / "experiment.json"))
    shown = number or (versions[-1].number if versions else 0)
    return [f"{name}@{version.number}" for version in reversed(versions) if version.number != shown]
