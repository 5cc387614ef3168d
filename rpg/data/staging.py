"""The data stage: reads sources and writes two Parquet files and a summary."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path as FilePath

import pyarrow as pa
import pyarrow.parquet as pq

from rpg.data import metadata
from rpg.data.overlap import Questions, Words, without_instruction, words_of
from rpg.data.problems import SourceProblem, StagedProblem, text_of
from rpg.data.prompts import check_template, staged
from rpg.data.unanswered import Item, item_of, write_items
from specs.documents.strict_json import half_character
from specs.errors import Issue, Path, SpecError
from specs.machine.files import files_under
from specs.machine.foreign.tables import allowed_memory, within_memory
from specs.schema.data import Data, Source, TemplatePrompt

SPLITS = ("train", "evaluation")
SCHEMA = pa.schema([(name, pa.string()) for name in ("problem_id", "prompt", "answer", "dataset", "metadata")])
"""Schema of a split. It also has the column `cluster` if a problem belongs to one, and `shown` if agents get some of a
problem's metadata."""


@dataclass(slots=True)
class StagedSet:
    """A set with its problems and the counts of those removed."""

    path: Path
    """The set's path in the spec."""
    problems: list[StagedProblem]
    generated: bool = False
    """See Source."""
    read: int = 0
    duplicates: int = 0
    """Number of copies removed."""
    conflicting: int = 0
    """Number of those copies whose answer differs from that of the problem kept."""
    overlapping: int = 0
    """Number of training problems left out because an evaluation set has the same problem."""

    @property
    def name(self) -> str:
        """Name of the set, or of its first problem's origin."""
        return self.problems[0].dataset


def stage(data: Data, out: FilePath) -> None:
    """Writes train.parquet, evaluation.parquet and summary.json into `out`. Raises SpecError if the data is wrong.

    The summary also holds the time, which chat templates read from then on.
    """
    check_template(data.prompt.template)
    sets = {
        split: [
            _read_set(source, data, ("data", split, index))
            for index, source in enumerate(getattr(data, split))
            if source.answered
        ]
        for split in SPLITS
    }
    _check_names(sets["evaluation"])
    unanswered = [(index, source) for index, source in enumerate(data.evaluation) if not source.answered]
    write_items([item for index, source in unanswered for item in _read_items(source, index)], out)
    _separate(sets["train"], sets["evaluation"], drop=data.overlap == "drop")
    for split in SPLITS:
        _write(list(itertools.chain.from_iterable(each.problems for each in sets[split])), out / f"{split}.parquet")
    staged_at = datetime.now().isoformat(timespec="seconds")
    summary = {"staged_at": staged_at, **_summary(sets)}
    (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


def _read_set(source: Source, data: Data, path: Path) -> StagedSet:
    result = StagedSet(path, [], generated=source.generated)
    seen: dict[str, str] = {}
    for problem in _read(source, source.read(), path):
        item = staged(problem, data.prompt)
        result.read += 1
        if data.deduplicate and item.problem_id in seen:
            result.duplicates += 1
            result.conflicting += seen[item.problem_id] != item.answer
            continue
        seen[item.problem_id] = item.answer
        result.problems.append(item)
    if not result.read:
        raise _no_problems(source, path)
    # Cut only now, so that the counts cover the whole set.
    if source.limit:
        result.problems = result.problems[: source.limit]
    print(
        f"{'.'.join(map(str, path))}: {result.read} problems of {result.name}, {result.duplicates} copies removed, "
        f"{len(result.problems)} kept",
        flush=True,
    )
    return result


def _read_items(source: Source, index: int) -> list[Item]:
    """Returns the items of an evaluation set that is scored by likelihood. Raises SpecError if it has none."""
    path: Path = ("data", "evaluation", index)
    problems = _read(source, source.read(), path)
    kept = itertools.islice(problems, source.limit) if source.limit else problems
    items = [item_of(problem, source.source, number) for number, problem in enumerate(kept)]
    if not items:
        raise _no_problems(source, path)
    print(f"{'.'.join(map(str, path))}: {len(items)} items of {items[0].dataset}", flush=True)
    return items


def _no_problems(source: Source, path: Path) -> SpecError:
    return SpecError(Issue("the set has no problems", path=path, given=getattr(source, "path", "")))


def first_problems(source: Source, data: Data, path: Path, count: int) -> list[StagedProblem]:
    """Returns the first problems of a set: at most `count`, and within the set's limit. Raises SpecError as `stage`
    does.

    Args:
        path: the set's path in the spec.
    """
    wanted = min(count, source.limit or count)
    prompt = data.prompt if source.answered else TemplatePrompt()
    problems = [staged(problem, prompt) for problem in _read(source, source.peek(wanted), path)]
    if not problems and type(source).peek is Source.peek:  # other sources return none if reading is slow
        raise _no_problems(source, path)
    return problems


def _read(source: Source, problems: Iterator[SourceProblem], path: Path) -> Iterator[SourceProblem]:
    """Yields a source's problems. Raises its errors as SpecError at the source's path in the spec."""
    named = [FilePath(name) for _, _, name in source.paths()]
    files = [file for file in named if file.is_file()] + [file for each in named for file in files_under(each)]
    most = allowed_memory(sum(file.stat().st_size for file in files))
    try:
        # For a dataset on the Hub, of unknown size, the user names no file.
        for number, problem in enumerate(within_memory(problems, most) if files else problems, 1):
            if half := half_character(f"{text_of(problem.prompt)}{problem.answer}{metadata.dump(problem.metadata)}"):
                shown = text_of(problem.prompt)[:80].encode(errors="backslashreplace").decode()
                raise SpecError(Issue(f"problem {number} of the set holds {half}", given=shown))
            yield problem
    except MemoryError:
        given = ", ".join(map(str, named))
        message = f"reading it takes more than {most >> 30} GiB of memory, the limit for a file of its size"
        hint = "write the file again, with each row's values in full"
        raise SpecError(Issue(message, (*path, "path"), given, hint=hint)) from None
    except SpecError as error:
        raise SpecError(*(replace(issue, path=(*path, *issue.path)) for issue in error.issues)) from error


def _check_names(sets: list[StagedSet]) -> None:
    """Raises SpecError for two evaluation sets with the same name, because results are reported by name and would be
    mixed."""
    owner: dict[str, StagedSet] = {}
    for each in sets:
        for name in {problem.dataset for problem in each.problems}:
            if owner.setdefault(name, each) is not each:
                raise SpecError(
                    Issue(
                        f"two evaluation sets are called `{name}`",
                        path=(*each.path, "name"),
                        given=name,
                        hint="give each its own `name`",
                    )
                )


def _separate(train: list[StagedSet], evaluation: list[StagedSet], *, drop: bool) -> None:
    """Removes training problems that are evaluation problems. Raises SpecError for them unless `drop` is true, or if no
    problem is left."""
    held_out = _HeldOut(evaluation)
    errors: list[Issue] = []
    for each in train:
        if shared := held_out.shared_by(each):
            errors.append(_overlap(each, shared))
        each.overlapping = len(shared)
        each.problems = [problem for index, problem in enumerate(each.problems) if index not in shared]
    if train and not any(each.problems for each in train):
        total = sum(each.overlapping for each in train)
        raise SpecError(
            Issue(
                f"no training problem is left: all {total} are in the evaluation sets too",
                path=("data", "train"),
                hint="give training and evaluation sets that differ",
            )
        )
    if errors and not drop:
        raise SpecError(*errors)


def check_overlap(sets: Mapping[str, Sequence[tuple[Path, Source, Sequence[StagedProblem]]]], *, drop: bool) -> None:
    """Raises SpecError as `stage` does if problems of complete sets, each with its path, overlap."""
    train, evaluation = (
        [StagedSet(path, list(problems), generated=source.generated) for path, source, problems in sets[split]]
        for split in SPLITS
    )
    _separate(train, evaluation, drop=drop)


class _HeldOut:
    """An index of the evaluation problems for finding them among the training problems."""

    def __init__(self, evaluation: list[StagedSet]) -> None:
        self._by_prompt = {problem.problem_id: problem.dataset for each in evaluation for problem in each.problems}
        self._questions: list[tuple[Words, str]] = []
        """Questions of the sets that are not generated by a program, each with its set's name."""
        for each in evaluation:
            if not each.generated:
                questions = without_instruction([words_of(problem.text) for problem in each.problems])
                named = zip(questions, (problem.dataset for problem in each.problems), strict=True)
                self._questions += named
        self._search = Questions([question for question, _ in self._questions])

    def shared_by(self, train: StagedSet) -> dict[int, "_Shared"]:
        """Returns the held-out training problems by index.

        Problems found only by their question are printed: their prompts differ from the evaluation's.
        """
        shared: dict[int, _Shared] = {}
        for index, problem in enumerate(train.problems):
            if dataset := self._by_prompt.get(problem.problem_id):
                shared[index] = _Shared(problem.prompt, dataset)
            elif not train.generated and (at := self._search.held_by(words_of(problem.text))) is not None:
                question, dataset = self._questions[at]
                shared[index] = _Shared(" ".join(question), dataset, by_question=True)
                print(f"{'.'.join(map(str, train.path))}: a question of {shared[index]}", flush=True)
        return shared


@dataclass(frozen=True, slots=True)
class _Shared:
    """A match between a training problem and a problem of an evaluation set."""

    text: str
    """Matching text: the prompt, or the words of the question."""
    dataset: str
    by_question: bool = False

    def __str__(self) -> str:
        return f"`{self.dataset}`: {_cut(self.text)!r}"


def _overlap(train: StagedSet, shared: dict[int, _Shared]) -> Issue:
    verb = "problem is" if len(shared) == 1 else "problems are"
    first = next(iter(shared.values()))
    listed = "; the data stage's log names them" if any(each.by_question for each in shared.values()) else ""
    return Issue(
        f"{len(shared)} of {len(train.problems)} training {verb} in the evaluation sets too",
        path=train.path,
        given=f"{_cut(first.text)!r}, in `{first.dataset}`",
        hint=f"write `data.overlap: drop` to leave them out of training{listed}",
    )


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _write(problems: list[StagedProblem], file: FilePath) -> None:
    columns = [
        [problem.problem_id for problem in problems],
        [problem.prompt for problem in problems],
        [problem.answer for problem in problems],
        [problem.dataset for problem in problems],
        [metadata.dump(problem.metadata) for problem in problems],
    ]
    table = pa.table(columns, schema=SCHEMA)
    if any(problem.cluster for problem in problems):
        table = table.append_column("cluster", pa.array([problem.cluster for problem in problems], pa.string()))
    if any(problem.shown for problem in problems):
        shown = [list(problem.shown) for problem in problems]
        table = table.append_column("shown", pa.array(shown, pa.list_(pa.string())))
    pq.write_table(table, file)


def _summary(sets: dict[str, list[StagedSet]]) -> dict[str, object]:
    return {
        split: {
            "problems": sum(len(each.problems) for each in each_split),
            "sets": [
                {
                    "source": ".".join(map(str, each.path)),
                    "problems": len(each.problems),
                    "read": each.read,
                    "duplicates_removed": each.duplicates,
                    "conflicting_answers": each.conflicting,
                    "dropped_for_overlap": each.overlapping,
                }
                for each in each_split
            ],
        }
        for split, each_split in sets.items()
    }
