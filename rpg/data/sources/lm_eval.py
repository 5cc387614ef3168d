"""Tasks of the package lm-eval that score by likelihood."""

import re
from collections.abc import Collection, Iterator
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
        if self.path:
            _try_first(self.task, self.path, file)
        asked = {"task": self.task, "path": str(Path(self.path).absolute()) if self.path else "", "limit": self.limit}
        yield SourceProblem(
            file.read_text(encoding="utf-8"), "", self.name or self.task, metadata=asked, where=file.name
        )

    def _file(self) -> Path:
        """Returns the task's file. Raises SpecError if there is no such file, or if lm-eval is not installed."""
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
    """Returns a task file's settings, which take precedence over those of included files.

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
    for each in own.get("metric_list") or ():
        if (name := each.get("metric") if isinstance(each, dict) else each) not in _metrics():
            message = f"{file.name}: lm-eval has no such metric, and would run code of that name from elsewhere"
            raise _refusal(message, str(name))
    named = own.pop("include", [])
    merged: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        merged |= task_settings(file.parent / name)
    return merged | own


def loaded_task(task: str, path: str) -> Any:
    """Returns a task as lm-eval loads it. Its data files are looked up in the directory of its own file.

    Args:
        path: directory with task files; empty for the tasks that lm-eval ships.
    """
    from lm_eval import utils
    from lm_eval.tasks import TaskManager

    utils.env = _sandboxed(utils.env)
    manager = TaskManager(include_path=path or None, include_defaults=not path)
    file = manager.task_index[task].yaml_path
    assert file is not None, "the source has read it"
    settings = task_settings(Path(file))
    arguments = dict(settings.get("dataset_kwargs") or {})
    if path and "data_files" in arguments:
        arguments["data_files"] = _beside(arguments["data_files"], Path(path))
        return manager.load([settings | {"dataset_kwargs": arguments}])
    return manager.load([task])


def _sandboxed(environment: Any) -> Any:
    """Returns a Jinja environment in which templates cannot reach Python's internal attributes."""
    from jinja2.sandbox import SandboxedEnvironment

    found = SandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    found.filters.update(environment.filters)
    return found


def _try_first(task: str, path: str, file: Path) -> None:
    """Makes the requests of a task's first document. Raises SpecError if lm-eval cannot."""
    try:
        loaded = loaded_task(task, path)["tasks"][task]
        loaded.build_all_requests(limit=1)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        hint = "correct the task file; its `data_files` are relative to `path`"
        raise SpecError(
            Issue(f"{file.name}: lm-eval cannot create requests from it", ("task",), reason, hint=hint)
        ) from None


def _beside(files: Any, directory: Path) -> Any:
    """Returns the names of data files. Those in the directory have their whole path."""
    if isinstance(files, dict):
        return {split: _beside(each, directory) for split, each in files.items()}
    if isinstance(files, list):
        return [_beside(each, directory) for each in files]
    return str(directory / files) if (directory / files).exists() else files


def _metrics() -> Collection[str]:
    """Returns the names of lm-eval's own metrics."""
    from lm_eval.api import metrics, registry

    assert metrics, "importing it registers them"
    return set(registry.metric_registry.keys())


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
