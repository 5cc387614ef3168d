"""Files that a spec names: checks that they exist, and the context length in a model's config."""

import json
import os
from collections.abc import Iterator
from pathlib import Path as FilePath

from specs.bounds import read_within
from specs.errors import Issue, Path
from specs.schema.base import PathKind
from specs.schema.experiment import Experiment
from specs.schema.fields import nearest
from specs.schema.model import PretrainedModel, ScratchModel

CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
"""Names in transformers' configs for the longest sequence."""


def missing_files(experiment: Experiment) -> list[Issue]:
    """Returns issues with data files and model directories that do not exist."""
    issues = [
        *_data(experiment),
        *_model(experiment.model, ("model", "path")),
        *_rewards(experiment),
        *_rollouter(experiment),
    ]
    if experiment.trains and (teacher := experiment.reference.teacher) and teacher.path:
        issues += _model(teacher, ("reference", "path"))
    return issues


def _data(experiment: Experiment) -> Iterator[Issue]:
    for split, sources in (("train", experiment.data.train), ("evaluation", experiment.data.evaluation)):
        for index, source in enumerate(sources):
            for where, kind, path in source.paths():
                if message := _missing(kind, path):
                    yield Issue(message, ("data", split, index, *where), path, hint=_sibling(path))


def _rewards(experiment: Experiment) -> Iterator[Issue]:
    for at, reward in experiment.rewards():
        for where, kind, path in reward.paths():
            if message := _missing(kind, path):
                yield Issue(message, (*at, *where), path, hint=_sibling(path))


def _rollouter(experiment: Experiment) -> Iterator[Issue]:
    for where, kind, path in experiment.rollout.rollouter.paths():
        if message := _missing(kind, path):
            yield Issue(message, ("rollout", "rollouter", *where), path, hint=_sibling(path))


def _missing(kind: PathKind, path: str) -> str:
    """Returns the problem with a path; empty if the path exists, or may be an id."""
    if kind == "file":
        what = "a directory" if os.path.isdir(path) else "a device or a pipe" if os.path.exists(path) else ""
        return "" if os.path.isfile(path) else f"is {what}, not a file" if what else "no such file"
    if kind == "directory":
        return "" if os.path.isdir(path) else "is not a directory" if os.path.exists(path) else "no such directory"
    return "" if os.path.exists(path) or not os.path.isabs(path) else "no such dataset directory"


def _model(model: PretrainedModel | ScratchModel, where: Path) -> Iterator[Issue]:
    if not isinstance(model, PretrainedModel) or not os.path.isabs(model.path):
        return
    if not os.path.isdir(model.path):
        hint = _sibling(model.path) or "a Hub id is written without a leading dot or slash: Qwen/Qwen3-4B-Base"
        yield Issue("no such model directory", where, model.path, hint=hint)
    elif not os.path.isfile(os.path.join(model.path, "config.json")):
        yield Issue("the directory contains no model", where, model.path, allowed="a directory with a config.json")


def _sibling(path: str) -> str:
    folder, name = os.path.split(path)
    if os.path.isfile(path):
        return f"write its directory: {folder}"
    if os.path.isdir(path):
        return f"name a file in {path}"
    try:
        return nearest(name, os.listdir(folder), cutoff=0.8)
    except (OSError, ValueError):
        return f"there is no directory {folder}"


def context_length(model: PretrainedModel | ScratchModel) -> int:
    """Returns the number of tokens that the model can attend to; 0 if unknown."""
    config: object = {}
    if isinstance(model, ScratchModel):
        config = model.config
    elif FilePath(model.path).is_absolute():
        try:
            config = json.loads(read_within(os.path.join(model.path, "config.json")))
        except (OSError, ValueError, RecursionError):
            return 0
    lengths = [config.get(key) for key in CONTEXT_KEYS] if isinstance(config, dict) else []
    return next((value for value in lengths if isinstance(value, int) and value > 0), 0)
