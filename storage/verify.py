"""Search for faults of the index or its source files, and their effects. It changes nothing."""

from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

import duckdb

from specs.documents.names import is_readable_name
from specs.documents.reading import numbered, read_checked, read_document
from specs.machine.liveness import FINAL, STATUSES
from specs.reading.recorded import unreadable
from storage import database, store
from storage.columns import NATIVE
from storage.contents import half_written, is_damaged, left_out, lost, merged_away, read
from storage.errors import QueryError
from storage.segments import BadSegmentError, Segment, entries, misnamed_files, run_segments
from storage.units import GONE, KnownSegment, known_segments

_ANSWERS = {
    "metrics": "learning curves, compare and report lack these steps",
    "rollouts": "queries of rollouts, and replay, lack these steps",
    "tokens": "queries of tokens, and replay, lack these steps",
    "turns": "conversations lack these steps",
    "events": "the run's list of events is incomplete",
    "checkpoints": "the list of checkpoints is incomplete; the checkpoints themselves are complete",
    "evaluations": "runs, compare, report and leaderboard show the accuracy of the wrong step",
    "evaluation_samples": "intervals of compare and report lack these problems",
    "evaluation_scores": "retention in compare and report lacks these items",
    "drift_samples": "drift in compare and report lacks these problems",
}
"""Table -> effect of a lost segment."""
_OTHER_DOCUMENTS = ("experiments/*/*.json", "studies/*/study.json", "artifacts/*/[!.]*/manifest.json")
_TEXTS = (
    ("rollouts", "verdicts", "ARRAY", "a JSON list of objects", "the view `verdicts` lacks them"),
    ("evaluation_samples", "verdicts", "ARRAY", "a JSON list of objects", "the view `verdicts` lacks them"),
    ("evaluation_samples", "turns", "ARRAY", "a JSON list of objects", "the view `turns` lacks them"),
    ("rollouts", "reward_terms", "OBJECT", "a JSON object", "replay and the report of the terms lack them"),
)
"""Columns with JSON: table, column, type of the JSON, name of the type, and effect of a row with another type."""
_CURE = "restore it from a backup"
_EACH_STEP = ("metrics", "rollouts")
"""Tables with rows of every step."""


def check(home_root: Path, *, full: bool = False) -> list[str]:
    """Returns a line for each fault, with the file's path in the home; empty without faults.

    A segment that is not ingested yet is not a fault.

    Args:
        full: reads every segment whole, and searches for runs that only their experiments list; if false, reads only
            segments that have changed since they were ingested, or are not ingested yet.
    """
    root = Path(home_root).absolute()
    known, obstacle = _index(root)
    runs = [entry.name for entry in entries(root / "runs") if entry.is_dir()]
    lines = [f"{_shown(f'runs/{run}')}: not a valid run name; ignored" for run in runs if not is_readable_name(run)]
    lines += [line for run in runs if is_readable_name(run) for line in _run(root, run, known, full=full)]
    lines += [
        line for pattern in _OTHER_DOCUMENTS for path in sorted(root.glob(pattern)) for line in _document(root, path)
    ]
    lines += _absent(root, set(runs)) if full else []
    if obstacle := obstacle or database.damage_of_index(root):
        return [*lines, f"experiments.duckdb: {obstacle}; `rpg db rebuild` rebuilds it"]
    return [*lines, *_gone(root, known), *_copies(root), *_packs(root, full=full), *_unreadable_texts(root)]


def _shown(path: str) -> str:
    """Returns a path in printable form."""
    return path if path.isprintable() else ascii(path)[1:-1]


def _index(root: Path) -> tuple[dict[str, KnownSegment], str]:
    """Returns the segments in the index, by key, and the index's fault, which is empty if it has none or if there is no
    index."""
    connection = database.connect()
    try:
        obstacle = database.attach(connection, root)
        if obstacle:
            return {}, "" if obstacle == "missing" else obstacle
        return known_segments(connection, "store.recorded", "true"), ""
    except duckdb.Error as error:
        return {}, f"damaged: {str(error).splitlines()[0]}"
    finally:
        connection.close()


def _run(root: Path, run_id: str, known: dict[str, KnownSegment], *, full: bool) -> Iterator[str]:
    yield from _documents(root, root / "runs" / run_id)
    for key in misnamed_files(root, run_id):
        yield f"{_shown(key)}: not a valid segment name; ignored"
    listed = run_segments(root, run_id)
    passed_over = merged_away(root, listed) | half_written(root, listed)
    segments = [segment for segment in listed if segment.key not in passed_over]
    for segment in segments:
        yield from _segment(root, segment, None if full else known.get(segment.key))
    yield from _missing_steps(root / "runs" / run_id, segments)


def _documents(root: Path, directory: Path) -> Iterator[str]:
    name = f"runs/{directory.name}"
    for document in ("run.json", "state.json"):
        if not (directory / document).is_file():
            yield f"{name}/{document}: missing; {_CURE}"
    paths = [
        path
        for pattern in ("*.json", "leases/*.json", "evaluate/[!.]*/manifest.json")
        for path in directory.glob(pattern)
    ]
    for path in sorted(paths):
        yield from _document(root, path)
    status = read_document(directory / "state.json").get("status", "pending")
    if status not in STATUSES:
        yield f"{name}/state.json: status `{status}` is none of {', '.join(STATUSES)}"
    for path in sorted((directory / "attempts").glob("*.json")):
        yield from _document(root, path)
        if "resumed_from_step" not in read_document(path):
            yield f"{name}/attempts/{path.name}: does not name the step it resumed from; replaced rows appear twice"


def _document(root: Path, path: Path) -> Iterator[str]:
    for problem in unreadable(path.parent) if path.name == "spec.json" else read_checked(path)[1]:
        yield f"{_shown(path.relative_to(root).as_posix())}: {problem}; ignored; {_CURE}"


def _segment(root: Path, segment: Segment, known: KnownSegment | None) -> Iterator[str]:
    if known and not known.problem and segment == known.segment:
        return  # unchanged since it was ingested
    try:
        rows = read(root, segment)
    except BadSegmentError as error:
        lost = "" if str(error).startswith("foreign") else f"; {_ANSWERS[segment.table]}"
        yield f"{segment.key}: {error}{lost}"
        return
    except FileNotFoundError:
        return
    for other in set(rows.column("run_id").unique().to_pylist()) - {segment.run_id}:
        yield f"{segment.key}: foreign: it has rows of run `{other}`"


def _missing_steps(directory: Path, segments: list[Segment]) -> Iterator[str]:
    """Yields the steps of an ended run, up to its last step, for which a table has no rows."""
    if read_document(directory / "state.json").get("status") not in FINAL:
        return
    last = read_document(directory / "progress.json").get("step")
    if not isinstance(last, int) or not numbered(directory / "attempts"):
        return
    unrecorded = left_out(directory)
    for table in (table for table in _EACH_STEP if table not in unrecorded):
        names = [s.parsed for s in segments if s.table == table and not s.is_of_evaluate_stage]
        recorded = {step for name in names for step in range(name.first_step, name.last_step + 1)}
        missing = [step for step in range(1, last + 1) if step not in recorded]
        if missing:
            steps = f"{len(missing)} of {last} steps, the first {missing[0]}"
            yield f"runs/{directory.name}/segments/{table}: no rows of {steps}; {_ANSWERS[table]}"


def _gone(root: Path, known: dict[str, KnownSegment]) -> Iterator[str]:
    """Yields segments that the index has or had and that are missing without a replacement."""
    missing: dict[str, list[Segment]] = {}
    for entry in known.values():
        if not (root / entry.segment.key).exists():
            missing.setdefault(entry.segment.run_id, []).append(entry.segment)
    for run_id, segments in missing.items():
        for segment in lost(root, run_id, segments, run_segments(root, run_id)):
            yield f"{segment.key}: {GONE}; {_ANSWERS[segment.table]}; {_CURE}, or `rpg db rebuild` forgets it"


def _absent(root: Path, runs: Set[str]) -> Iterator[str]:
    """Yields runs of an experiment or a study that have no directory."""
    for path in sorted([*root.glob("experiments/*/experiment.json"), *root.glob("studies/*/study.json")]):
        kind, name, _ = path.relative_to(root).parts
        document = read_document(path)
        listed = list(document.get("runs") or ())
        for part in (*(document.get("versions") or ()), *(document.get("trials") or ())):
            listed += part.get("runs") or part.get("run_ids") or ()
        for run_id in dict.fromkeys(listed):
            if run_id not in runs:
                of = f"the {'study' if kind == 'studies' else 'experiment'} {name}"
                yield f"{_shown(f'runs/{run_id}')}: gone, and {of} lists it; answers lack it; {_CURE}, or run it again"


def _packs(root: Path, *, full: bool) -> Iterator[str]:
    """Yields packs that were changed after they were written. Answers need no packs, but damaged ones may make answers
    wrong or slow."""
    connection = database.connect()
    try:
        if database.attach(connection, root):
            return
        packs = connection.execute("SELECT DISTINCT pack, num_bytes FROM store.recorded.packed ORDER BY ALL").fetchall()
    finally:
        connection.close()
    for pack, num_bytes in packs:
        if not (root / pack).exists():
            yield f"{pack}: gone; answers are slower; `rpg db rebuild` rebuilds it"
        elif not database.has_pack(root, pack, num_bytes) or (full and is_damaged(root, pack)):
            yield f"{pack}: damaged: its content has changed; `rpg db rebuild` rebuilds it"


def _copies(root: Path) -> Iterator[str]:
    """Checks that the index has as many rows as the segments, for each table that it copies."""
    connection = database.connect()
    try:
        if database.attach(connection, root):
            return
        for table in NATIVE:
            expected = "SELECT run_id, sum(num_rows) AS n FROM store.recorded.segments WHERE table_name = ? GROUP BY 1"
            copied = f"SELECT run_id, count(*) AS n FROM store.recorded.{table} GROUP BY 1"
            differing = connection.execute(
                "SELECT run_id, coalesce(e.n, 0)::BIGINT, coalesce(c.n, 0)"
                f" FROM ({expected}) AS e FULL JOIN ({copied}) AS c USING (run_id)"
                " WHERE coalesce(e.n, 0) <> coalesce(c.n, 0) ORDER BY run_id",
                [table],
            ).fetchall()
            for run_id, in_segments, in_index in differing:
                yield (
                    f"experiments.duckdb: has {in_index} rows of {table} of run {run_id}, its segments {in_segments};"
                    " `rpg db rebuild` rebuilds it"
                )
    except duckdb.Error as error:
        yield f"experiments.duckdb: damaged: {str(error).splitlines()[0]}; `rpg db rebuild` rebuilds it"
    finally:
        connection.close()


def _unreadable_texts(root: Path) -> Iterator[str]:
    """Names the runs with rows whose JSON columns have another type."""
    with store.Store.open(root) as record, suppress(QueryError):  # a damaged file, which another check reports
        for table, column, kind, words, meaning in _TEXTS:
            elements = f" AND list_distinct(json_type({column}, '$[*]')) <@ ['OBJECT']" if kind == "ARRAY" else ""
            fits = f"coalesce(TRY(json_type({column}) = '{kind}'{elements}), false)"
            rows = record.query(
                f"SELECT run_id, count(*), min(step) FROM {table} WHERE {column} IS NOT NULL AND NOT {fits}"
                " GROUP BY run_id ORDER BY run_id"
            ).rows
            for run_id, count, step in rows:
                yield (
                    f"runs/{run_id}: {count} rows of {table}, the first of step {step}, have {column} that are not"
                    f" {words}; {meaning}"
                )
