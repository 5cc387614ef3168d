"""Tasks of the package lm-eval that score by likelihood."""

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rpg.data.problems import SourceProblem
from specs.errors import Issue, SpecError
from specs.schema.base import names_path
from specs.schema.data import Source
from specs.schema.fields import nearest

KINDS = ("multiple_choice", "loglikelihood_rolling")
"""Output types of lm-eval that are measured."""
_REFUSED = ("class", "hf_evaluate", "unsafe_code", "use_prompt")
"""Keys of a task file that run or fetch other code."""
_FUNCTION = re.compile(r"^[^#]*!function\b")


class LmEvalSource(Source):
    """An evaluation set without sampling: a task of lm-eval (extra `lm_eval`), scored by its own metrics from the
    learner's logprobs. Its output type is multiple_choice or loglikelihood_rolling; a task file that imports code
    (`!function`) is refused."""

    answered: ClassVar[bool] = False

    task: str = Field(min_length=1)
    """Name of the task, as its file has it."""
    path: str = names_path("directory", "")
    """Directory with task files and their data, relative to the spec file; `data_files` of a task are relative to it.
    Empty: the tasks that lm-eval ships, whose data may need a download."""

    def identity(self) -> dict[str, Any]:
        """See Spec; includes the version of lm-eval."""
        return super().identity() | {"version": _version()}

    def read(self) -> Iterator[SourceProblem]:
        """See Source; yields one problem, the task."""
        file = self._file()
        settings = task_settings(file)
        if settings.get("output_type") not in KINDS:
            given = str(settings.get("output_type", "generate_until"))
            raise SpecError(
                Issue(f"{file.name}: tasks of this output type are not measured", ("task",), given, ", ".join(KINDS))
            )
        asked = {"task": self.task, "path": str(Path(self.path).absolute()) if self.path else "", "limit": self.limit}
        yield SourceProblem(
            file.read_text(encoding="utf-8"), "", self.name or self.task, metadata=asked, where=file.name
        )

    def _file(self) -> Path:
        """Returns the task's file. Raises SpecError if it has no file, or lm-eval is not installed."""
        if not _version():
            hint = 'pip install "rpg-experiments[lm_eval]"'
            raise SpecError(
                Issue("needs the package lm-eval, which is not installed", ("source",), "lm_eval", hint=hint)
            )
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=self.path or None, include_defaults=not self.path)
        entry = manager.task_index.get(self.task)
        if entry is None:
            names = manager.all_subtasks
            listed = ", ".join(names) if len(names) <= 20 else f"one of {len(names)} tasks"
            raise SpecError(Issue("no such task", ("task",), self.task, listed, nearest(self.task, names)))
        if entry.yaml_path is None or self.task not in manager.all_subtasks:
            raise SpecError(
                Issue("is not a single task with a file", ("task",), self.task, hint="name its tasks one by one")
            )
        return Path(entry.yaml_path)


def task_settings(file: Path) -> dict[str, Any]:
    """Returns a task file's settings, those of included files below its own.

    Raises:
        SpecError: the file, or one that it includes, runs code.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if _FUNCTION.match(line):
            raise _refusal(f"{file.name}, line {number}: the task file imports code", line.strip())
    try:
        own = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise SpecError(Issue(f"{file.name} is not plain YAML: {error}", ("task",))) from None
    if not isinstance(own, dict):
        raise SpecError(Issue(f"{file.name} is not a task file", ("task",)))
    for key in _REFUSED:
        if own.get(key) or any(isinstance(each, dict) and each.get(key) for each in own.get("metric_list") or ()):
            raise _refusal(f"{file.name}: `{key}` runs code from elsewhere", key)
    if hidden := next((each for each in _texts(own) if "{" in each and "__" in each), ""):
        raise _refusal(f"{file.name}: a template reaches into Python objects", hidden)
    named = own.pop("include", [])
    merged: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        merged |= task_settings(file.parent / name)
    return merged | own


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a value from YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _refusal(message: str, given: str) -> SpecError:
    hint = "write the documents out as a file, and the task without code"
    return SpecError(Issue(message, ("task",), given[:120], "a task file without code", hint))


def _version() -> str:
    """Returns the installed version of lm-eval; empty if it is not installed."""
    try:
        return metadata.version("lm-eval")
    except metadata.PackageNotFoundError:
        return ""
