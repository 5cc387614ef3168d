"""The cells of a matrix: their values, their data, and their issues, which are reported at the matrix's line."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from specs.bounds import MAX_CHECKED_VALUES, MAX_COMBINATIONS, MAX_EXCLUDED, MAX_RUNS, comparable, repeats
from specs.errors import Issue, Path, Positions, nearest_position, placed
from specs.labels import is_called
from specs.model_evaluation import schema_of
from specs.published import SpecOfCell, warnings_of_cells
from specs.reading.validate import parse, show
from specs.rules import issues_of, warnings_of
from specs.schema.experiment import Experiment, Matrix
from specs.schema.fields import below, carried_over, kept_in_another, no_such_item, split, unknown

FIXED = ("name", "question", "seeds", "matrix")
"""Fields that belong to the experiment as a whole."""


def combinations(matrix: Matrix | None) -> list[dict[str, Any]]:
    """Returns the values of each cell, path -> value. Without a matrix, returns one empty cell."""
    if matrix is None:
        return [{}]
    rows = zip(*matrix.zip.values(), strict=True) if matrix.zip else iter([()])
    zipped = [dict(zip(matrix.zip, row, strict=True)) for row in rows]
    cells = []
    for values in product(*matrix.product.values()):
        for row in zipped:
            cell = {**dict(zip(matrix.product, values, strict=True)), **row}
            if not any(_agrees(cell, entry) for entry in matrix.exclude):
                cells.append(cell)
    return cells


def _agrees(cell: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(path in cell and cell[path] == value for path, value in entry.items())


def cell_label(matrix: Matrix | None, values: Mapping[str, Any]) -> str:
    """Returns the cell's name in the spec: the label of its row and the values of `product`; empty if rows have no
    labels."""
    if matrix is None or not matrix.labels:
        return ""
    label = matrix.labels[_row(matrix, values)]
    return ", ".join([label, *(f"{path} {_as_text(values[path])}" for path in matrix.product)])


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def cell_source(source: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of one cell: the files' data, with the cell's values and without the matrix."""
    return with_values({key: value for key, value in source.items() if key != "matrix"}, values)


def with_values(source: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the source with values set at their dotted paths. A section is set before its fields, and its
    type before other fields.

    A section that changes its type keeps the fields that the new type has too. A section that changes its source loses
    its other fields, since they belonged to the old source.
    """
    result = copy.deepcopy(dict(source))
    settings = ((split(text), value) for text, value in values.items())
    for path, value in sorted(settings, key=lambda setting: setting_order(setting[0])):
        _set(result, path, copy.deepcopy(value))
    return result


def setting_order(path: Path) -> tuple[int, bool]:
    """Returns the key by which settings are sorted: a section before its fields, and its type before other fields."""
    return len(path), path[-1] not in ("type", "source")


def _set(target: Any, path: Path, value: Any) -> None:
    schema: tuple[Any, ...] = (Experiment,)
    for part, following in pairwise(path):
        schema = below(schema, part)
        if isinstance(target, list):
            target = target[int(part)]
            continue
        held = target.get(part)
        if not isinstance(held, dict) and not (isinstance(held, list) and str(following).isdigit()):
            target[part] = {}
        target = target[part]
    last = path[-1]
    if isinstance(target, dict):
        kept = (kept_in_another if last == "type" else carried_over)(schema, target, str(last), value)
        target.clear()
        target.update(kept)
    target[last] = value


def base_of(source: dict[str, Any]) -> dict[str, Any]:
    """Returns the source, with the first cell's values for fields that only the matrix supplies."""
    matrix, issues = parse(Matrix, source.get("matrix") or {})
    if issues or list(_matrix_issues(matrix, source)):
        return source
    first = next(iter(combinations(matrix)), {})
    return with_values(source, {path: value for path, value in first.items() if not _present(source, split(path))})


def _present(source: Any, path: Path) -> bool:
    for part in path:
        if source is None or (isinstance(source, dict) and part not in source):
            return False
        if not isinstance(source, (dict, list)):
            return True  # a value in place of a section, which the schema reports
        source = source[part] if isinstance(source, dict) else source[int(part)]
    return True


def check_cells(
    source: dict[str, Any], experiment: Experiment, positions: Positions
) -> tuple[list[Issue], list[Issue]]:
    """Returns the errors and warnings of all runs, each once. If the matrix causes an issue, it is reported at the
    matrix's line."""
    issues = list(_matrix_issues(experiment.matrix, source)) if experiment.matrix else []
    if issues:
        return issues, []
    cells = combinations(experiment.matrix)
    if len(cells) * len(experiment.seeds) > MAX_RUNS:
        given = f"{len(cells)} cells x {len(experiment.seeds)} seeds"
        return [
            Issue("too many runs", ("matrix",) if experiment.matrix else ("seeds",), given, f"at most {MAX_RUNS}")
        ], []
    num_values = num_values_of(source)
    if len(cells) * num_values > MAX_CHECKED_VALUES and experiment.matrix:
        given = f"{len(cells)} cells, each with the {num_values} values of the spec"
        return [Issue("too many cells", ("matrix",), given, f"at most {MAX_CHECKED_VALUES} values in all cells")], []
    cells_with: dict[Issue, list[dict[str, Any]]] = {}
    cells_warned: dict[Issue, list[dict[str, Any]]] = {}
    specs: list[SpecOfCell] = []
    for values in cells:
        written = cell_source(source, values)
        run, issues = parse(schema_of(written), written)
        specs += [] if issues else [SpecOfCell(written, run)]
        for issue in issues or issues_of(run):
            cells_with.setdefault(issue, []).append(values)
        for warning in [] if issues else warnings_of(run):
            cells_warned.setdefault(warning, []).append(values)

    def blamed(by_issue: dict[Issue, list[dict[str, Any]]]) -> list[Issue]:
        return [_blame(issue, having, len(cells), experiment.matrix, positions) for issue, having in by_issue.items()]

    differing = warnings_of_cells(specs, experiment.matrix) if experiment.matrix else ()
    return blamed(cells_with), [*blamed(cells_warned), *differing, *_beside_nothing(experiment)]


def num_values_of(source: Mapping[str, Any]) -> int:
    """Returns the number of keys and list items of the data without the matrix. The time to check a cell is
    proportional to it."""
    waiting: list[Any] = [value for key, value in source.items() if key != "matrix"]
    count = 0
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, (dict, list, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
    return count


def multiplied_by_another_file(matrix: Matrix | None, positions: Positions) -> list[Issue]:
    """Returns a warning if both the extended file and the file itself vary fields in a matrix."""
    here, there = positions.get(()), {}
    for part, paths in (("product", matrix.product), ("zip", matrix.zip)) if matrix else ():
        for path in paths:
            at = nearest_position(("matrix", part, path), positions)
            there[path] = at.file if at else ""
    own = [path for path, file in there.items() if here and file == here.file]
    others = [path for path, file in there.items() if path not in own and not file.startswith("--set")]
    if not own or not others:
        return []
    given = f"{', '.join(own)} here, {', '.join(others)} in {there[others[0]]}: {len(combinations(matrix))} cells"
    hint = f"to vary no others, write `{others[0]}: null` in the same part of the matrix here"
    return [Issue("the matrix of the extended file also varies fields", ("matrix",), given, hint=hint)]


def varied_place(matrix: Matrix | None, values: Mapping[str, Any], path: Path) -> Path | None:
    """Returns the place in the matrix of a cell's value at a path of its spec; None if the value does not vary.

    Args:
        values: the cell's values.
    """
    related = [text for text in values if _related(split(text), path)]
    if matrix is None or not related:
        return None
    above = [text for text in related if len(split(text)) <= len(path)]
    varied = max(above or related, key=lambda text: len(split(text)))
    return _place(matrix, varied, values)


def _blame(
    issue: Issue, having: list[dict[str, Any]], num_cells: int, matrix: Matrix | None, positions: Positions
) -> Issue:
    """Returns the issue, placed at the line of the matrix value that causes it if there is one. `having`: the cells
    with the issue."""
    if matrix is None:
        return issue
    values = having[0]
    related = [path for path in values if _related(split(path), issue.path)]
    if not related and len(having) == num_cells:
        return issue
    common = {path: value for path, value in values.items() if all(cell[path] == value for cell in having)}
    path = max(related, key=lambda text: len(split(text))) if related else next(iter(common or values))
    place = nearest_position(_place(matrix, path, values), positions)
    if not related:
        cell = ", ".join(f"{name}={show(value)}" for name, value in (common or values).items())
        issue = replace(issue, message=f"{issue.message} (in the run with {cell})")
    return placed(issue, place) if place else issue


def _related(path: Path, other: Path) -> bool:
    length = min(len(path), len(other))
    return path[:length] == other[:length]


def _row(matrix: Matrix, values: Mapping[str, Any]) -> int:
    """Returns a cell's row of `zip`, which is found by all its values."""
    wanted = tuple(values[path] for path in matrix.zip)
    return next(index for index, row in enumerate(zip(*matrix.zip.values(), strict=True)) if row == wanted)


def _place(matrix: Matrix, path: str, values: Mapping[str, Any]) -> Path:
    """Returns the place, in the matrix, of a cell's value for a path."""
    if path in matrix.product:
        return ("matrix", "product", path, matrix.product[path].index(values[path]))
    return ("matrix", "zip", path, _row(matrix, values))


def _matrix_issues(matrix: Matrix, source: Mapping[str, Any]) -> Iterator[Issue]:
    for section in ("product", "zip"):
        for path, values in getattr(matrix, section).items():
            yield from _axis_issues(section, path, values, source)
    for path in matrix.product.keys() & matrix.zip.keys():
        yield Issue("varies in product and in zip", ("matrix", "zip", path), hint="keep one of the two")
    lengths = {path: len(values) for path, values in matrix.zip.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{path} {length}" for path, length in lengths.items())
        yield Issue("lists of unequal length", ("matrix", "zip"), given, hint="zip takes them row by row")
        return
    rows = list(zip(*matrix.zip.values(), strict=True))
    for index in repeats(rows):
        where = ("matrix", "zip", next(iter(matrix.zip)), index)
        yield Issue("the row is given twice", where, show(list(rows[index])))
    yield from _label_issues(matrix.labels, len(rows))
    if too_many := _too_many_combinations(matrix):
        yield too_many
    else:
        yield from _exclude_issues(matrix)


def _too_many_combinations(matrix: Matrix) -> Issue | None:
    """Returns an issue if a matrix is too large to expand. Combinations that `exclude` leaves out count too."""
    lengths = [len(values) for values in matrix.product.values()]
    lengths += [len(values) for values in list(matrix.zip.values())[:1]]
    if math.prod(lengths) > MAX_COMBINATIONS:
        given = f"{' x '.join(map(str, lengths))} combinations"
        return Issue("too many runs", ("matrix",), given, f"at most {MAX_COMBINATIONS}, before exclude")
    if len(matrix.exclude) > MAX_EXCLUDED:
        given, allowed = f"{len(matrix.exclude)} entries", f"at most {MAX_EXCLUDED}"
        return Issue("too many entries", ("matrix", "exclude"), given, allowed, "vary fewer values instead")
    return None


def _label_issues(labels: tuple[str, ...], num_rows: int) -> Iterator[Issue]:
    if labels and len(labels) != num_rows:
        given, allowed = f"{len(labels)} labels", f"{num_rows}, the rows of zip"
        yield Issue("not one label for each row", ("matrix", "labels"), given, allowed)
    again = set(repeats(labels))
    for index, label in enumerate(labels):
        if not label.strip():
            yield Issue("the label is empty", ("matrix", "labels", index), show(label))
        elif index in again:
            yield Issue("the label is given twice", ("matrix", "labels", index), show(label))


def _axis_issues(section: str, path: str, values: list[Any], source: Mapping[str, Any]) -> Iterator[Issue]:
    where = ("matrix", section, path)
    parts = split(path)
    if parts[0] in FIXED:
        yield Issue(f"`{parts[0]}` cannot vary", where, hint="it belongs to the experiment as a whole")
    elif issue := unknown(Experiment, parts) or no_such_item(source, parts):
        yield replace(issue, path=where)
    if not values:
        yield Issue("must have at least 1 item", where, "[]")
    if section == "product":
        for index in repeats([type(value).__name__, value] for value in values):
            yield Issue("the value is given twice", (*where, index), show(values[index]))


def _beside_nothing(experiment: Experiment) -> Iterator[Issue]:
    """Yields issues for figures from the literature that match no row or set. Without a matrix, as in a study, figures
    are not shown."""
    if experiment.matrix is None:
        return
    labels = experiment.matrix.labels
    datasets = [source.name for source in experiment.data.evaluation if source.name]
    for index, table in enumerate(experiment.evaluation.literature):
        where = ("evaluation", "literature", index)
        for label in table.rows:
            if not any(is_called(known, label) for known in labels):
                allowed = ", ".join(labels)
                yield Issue("no row of matrix.zip has this label", (*where, "rows", label), label, allowed)
        for place, dataset in enumerate(table.datasets):
            if dataset not in datasets:
                yield Issue(
                    "no evaluation set has this name", (*where, "datasets", place), show(dataset), ", ".join(datasets)
                )


def _exclude_issues(matrix: Matrix) -> Iterator[Issue]:
    axes = matrix.product | matrix.zip
    known = {path: {comparable(value) for value in values} for path, values in axes.items()}
    for index, entry in enumerate(matrix.exclude):
        where = ("matrix", "exclude", index)
        if not entry:
            yield Issue("excludes everything", where, "{}")
        for path, value in entry.items():
            if path not in known:
                yield Issue("does not vary", (*where, path), allowed=", ".join(axes), hint="exclude names matrix paths")
            elif comparable(value) not in known[path]:
                yield Issue("excludes nothing", (*where, path), show(value), ", ".join(map(show, axes[path])))
    if all(axes.values()) and not combinations(matrix):
        yield Issue("every combination is excluded", ("matrix", "exclude"))
