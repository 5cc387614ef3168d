"""The schema as paths: which fields there are, what a value may be. Walks annotations, unions included."""

import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specs.errors import Issue, IssueError, Path
from specs.extensions import find_variant, variants
from specs.schema.base import is_open, item_of


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, with Annotated, unions and None taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in members(part))
    return () if annotation is type(None) else (annotation,)


def is_model(annotation: Any) -> bool:
    """Whether the type is a section of the schema."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def literal_of(field: FieldInfo) -> tuple[Any, ...]:
    """The values that a Literal field may have; empty for others."""
    return tuple(value for part in members(field.annotation) if get_origin(part) is Literal for value in get_args(part))


def tag_of(models: Iterable[type[BaseModel]]) -> str | None:
    """The field whose value tells these models apart."""
    sections = list(models)
    for name in ("type", "source", "engine"):
        if sections and all(name in model.model_fields for model in sections):
            return name
    return None


def choose(annotation: Any, tag: Any) -> type[BaseModel] | None:
    """The model of a union whose tag field has this value."""
    models = [part for part in members(annotation) if is_model(part)]
    name = tag_of(models)
    if name is None:  # a union told apart by the key that is there, such as a study's ranges
        return next((model for model in models if tag in _required(model)), None)
    return next((model for model in models if tag in literal_of(model.model_fields[name])), None)


def sections_of(annotations: Iterable[Any], data: Mapping[str, Any]) -> list[type[BaseModel]]:
    """The models that a section's data may be of: the one that its tag chooses, all where it chooses none."""
    models = [annotation for annotation in annotations if is_model(annotation)]
    if len(models) == 1 and is_open(models[0]):
        with suppress(IssueError):
            return [find_variant(models[0], data.get(models[0].tag))]
    tag = tag_of(models)
    chosen = [model for model in models if tag and data.get(tag) in literal_of(model.model_fields[tag])]
    for kind in (model for model in models if is_open(model) and not chosen):  # of an installed package, beside ours
        with suppress(IssueError):
            return [find_variant(kind, data.get(kind.tag))]
    return chosen or models


def _required(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def below(annotations: Iterable[Any], part: str | int) -> tuple[Any, ...]:
    """The alternatives of what stands under `part`; empty where nothing can."""
    alternatives: list[Any] = []
    for annotation in sorted(annotations, key=is_open):
        if is_open(annotation) and alternatives:  # ours have it: no package is asked
            continue
        if is_model(annotation):
            for model in with_field(annotation, str(part)):
                alternatives += members(model.model_fields[str(part)].annotation)
        elif annotation is Any:
            alternatives.append(Any)
        elif get_origin(annotation) is dict:
            alternatives += members(get_args(annotation)[1])
        elif get_origin(annotation) in (list, tuple) and isinstance(part, int):
            alternatives += members(item_of(annotation, part))
    return tuple(alternatives)


def with_field(model: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """The models that may stand where this one does and have the field: itself, or variants of an open section."""
    if field in model.model_fields or not is_open(model):
        return [model] if field in model.model_fields else []
    for installed in (False, True):
        having = [one for one in variants(model, installed=installed).values() if field in one.model_fields]
        if having:
            return having
    return []


def names(annotations: Iterable[Any]) -> list[str]:
    """The fields that may stand here, sorted."""
    models = [annotation for annotation in annotations if is_model(annotation)]
    variants_too = [*models, *(variant for kind in models if is_open(kind) for variant in variants(kind).values())]
    return sorted({name for model in variants_too for name in model.model_fields})


def carried_over(
    annotations: Iterable[Any],
    section: Mapping[str, Any],
    key: str,
    value: Any,
    read: Callable[[Any], Any] = lambda it: it,
) -> dict[str, Any]:
    """The entries of a section that still belong to it once `key` has this value.

    None where that makes it another thing: a `source`, or a `type` that chooses between classes, has changed; not an
    `engine`, a way to do the same. Of an open section with a new `type` those stay that all its variants share.
    """
    if key not in section or read(section[key]) == value:
        return dict(section)
    # Where it is not known yet what stands around the section, others may fit there that have no such field.
    models = [annotation for annotation in annotations if is_model(annotation) and key in annotation.model_fields]
    chosen_by = [model for model in models if literal_of(model.model_fields[key])]
    kinds = [model for model in models if is_open(model) and model.tag == key and not chosen_by]
    if key == "type" and kinds:
        return {name: item for name, item in section.items() if name in kinds[0].model_fields}
    switches = (key == "source" and (kinds or chosen_by)) or (key == "type" and len(chosen_by) > 1)
    return {} if switches else dict(section)


def kept_in_another(annotations: Iterable[Any], section: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The entries of a section that it still has once `key`, which chooses its class, has this value.

    What is written holds for every class that has such a field, in the sections below too: of another objective
    `kl_coef` and the margins of its clip, but no `divergence`.
    """
    if key not in section or section[key] == value:
        return dict(section)
    # Where it is not known yet what stands around the section, others may fit there that have no such field.
    models = [annotation for annotation in annotations if is_model(annotation) and key in annotation.model_fields]
    kept = _fields_of(models, {**section, key: value})
    return {name: item for name, item in kept.items() if name != key}


def _fields_of(annotations: Iterable[Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are fields of the class that the section's tag chooses."""
    alternatives = tuple(annotations)
    models = sections_of(alternatives, section)
    if not models:
        return dict(section)
    fields = {name for model in models for name in model.model_fields}
    return {
        name: _fields_of(below(models, name), item) if isinstance(item, Mapping) else item
        for name, item in section.items()
        if name in fields
    }


def says(data: Any, path: Path) -> bool:
    """Whether data gives a value at the path, itself or through a shorter form of a section around it."""
    for part in path:
        if isinstance(data, Mapping):
            if part not in data:
                return False
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int):
            if part >= len(data):
                return False
            data = data[part]
        else:
            return True
    return True


_OTHER_NAMES = {
    **dict.fromkeys(("num_generations", "n_samples", "num_samples", "rollout_n", "samples_per_prompt"), "group_size"),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_tokens", "generate_max_len"), "max_response_length"
    ),
    **dict.fromkeys(("beta", "kl_beta", "kl_loss_coef", "init_kl_coef", "kl_penalty"), "kl_coef"),
    **dict.fromkeys(("epsilon", "epsilon_low", "clip_eps", "cliprange", "clip_low"), "low"),
    **dict.fromkeys(("epsilon_high", "clip_higher", "clip_high"), "high"),
    **dict.fromkeys(("lr", "actor_lr"), "learning_rate"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "train_steps"), "steps"),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size", "rollout_batch_size"), "prompts_per_step"),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), "aggregation"),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("reward_funcs", "reward_function", "rewards"), "reward"),
    **dict.fromkeys(("gpu", "gpus"), "cuda"),
    **{"urkl": "unnormalized_reverse", "ufkl": "unnormalized_forward", "rkl": "reverse", "fkl": "forward"},
}
"""What other frameworks and papers call a field or a value -> what it is called here."""
_PLACES = {
    "group_size": "training.group_size",
    "max_response_length": "rollout.max_response_length",
    "kl_coef": "objective.kl_coef",
    "low": "objective.clip.low",
    "high": "objective.clip.high",
    "learning_rate": "training.optimizer.learning_rate",
    "steps": "training.steps",
    "prompts_per_step": "training.prompts_per_step",
    "aggregation": "objective.aggregation",
    "epochs": "training.epochs",
    "reward": "reward",
}
"""Where a field stands that other frameworks have elsewhere."""
_REMOVED = {
    "ssh": "several machines are a Ray cluster: `ray start` on each, then launcher: {type: ray} (docs/clusters.md)",
    "population": "search the points of a schedule, objective.kl_coef.schedule.1.1: {float: [...]} (docs/studies.md)",
}
"""What earlier versions took -> what to write now."""


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint that names the closest of the allowed words, whatever its case, or what others or earlier versions call
    so; empty where none is close.

    >>> nearest("GRPO", ["ppo", "grpo"]), nearest("beta", ["kl_coef", "type"]), nearest("epsilon_high", ["steps"])
    ('did you mean `grpo`?', 'did you mean `kl_coef`?', 'here it is `objective.clip.high`')
    """
    known = {each.lower(): each for each in allowed}
    if word in _REMOVED and word not in known:
        return _REMOVED[word]
    meant = _OTHER_NAMES.get(word.lower(), word.lower())
    if meant in known:
        return f"did you mean `{known[meant]}`?"
    if meant in _PLACES and meant != word.lower():
        return f"here it is `{_PLACES[meant]}`"
    close = difflib.get_close_matches(meant, known, n=1, cutoff=cutoff)
    return f"did you mean `{known[close[0]]}`?" if close else ""


DOTTED_BELOW = (("matrix", "product"), ("matrix", "zip"), ("overrides",), ("parameters",))
"""Mappings whose keys are themselves paths."""


def split(text: str) -> Path:
    """`data.train.0.size` as a path; whole numbers are places in a list, and a matrix path stays one key.

    >>> split("data.train.0.size"), split("matrix.product.objective.kl_coef")
    (('data', 'train', 0, 'size'), ('matrix', 'product', 'objective.kl_coef'))
    """
    parts = text.split(".")
    for prefix in DOTTED_BELOW:
        if tuple(parts[: len(prefix)]) == prefix and len(parts) > len(prefix):
            return (*prefix, ".".join(parts[len(prefix) :]))
    return tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in parts)


def unknown(root: type[BaseModel], path: Path) -> Issue | None:
    """The issue with a path that the schema does not have; None where it has it."""
    here: tuple[Any, ...] = (root,)
    for index, part in enumerate(path):
        under = below(here, part)
        if not under:
            allowed = names(here)
            if not allowed:
                listed = any(get_origin(annotation) in (list, tuple) for annotation in here)
                numbered = ".".join(map(str, (*path[:index], 0, *path[index:])))
                return Issue("has no fields", path[:index], hint=f"items have numbers: `{numbered}`" if listed else "")
            return Issue(
                "unknown field", path[: index + 1], allowed=", ".join(allowed), hint=nearest(str(part), allowed)
            )
        here = under
    return None


def item_at(data: Any, path: Path) -> Any:
    """Value at a path of plain data; None where there is none."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.get(str(part)) if isinstance(data, Mapping) else None
    return data


def no_such_item(data: Any, path: Path) -> Issue | None:
    """The issue with a path that goes beyond the end of a list of `data`, or into one that is not there; else None."""
    for index, part in enumerate(path):
        if isinstance(data, list):
            if not isinstance(part, int) or part >= len(data):
                return Issue("no such item", path[: index + 1], allowed=f"0 to {len(data) - 1}")
            data = data[part]
        elif isinstance(part, int) and not isinstance(data, dict):
            return Issue(
                "no such item", path[: index + 1], allowed="none: there is no list", hint="give the list first"
            )
        else:
            data = data.get(str(part)) if isinstance(data, dict) else None
    return None


KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
}
SIGNS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def number(value: float) -> str:
    """Without a needless `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def kind_of(annotation: Any) -> str:
    """Kind of value, in words."""
    words: list[str] = []
    for part in members(annotation):
        if get_origin(part) is not None and str(get_origin(part)) == "typing.Literal":
            word = "one of the values allowed"
        elif is_model(part):
            word = "a mapping of fields"
        else:
            word = KINDS.get(get_origin(part) or part, "another value")
        if word not in words:
            words.append(word)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "another value"


def describe(annotation: Any, field: FieldInfo | None) -> str:
    """Values of a field: `a number in (0, 1)`, `a whole number, at least 1`, `dual, none`, a section's fields."""
    models = [part for part in members(annotation) if is_model(part)]
    if field and (values := literal_of(field)):
        flags = ("true", "false") if bool in members(annotation) else ()
        sections = [f"or the fields {', '.join(names(models))}"] if models else []
        return ", ".join([*flags, *map(str, values), *sections])
    if models:
        return "the fields " + ", ".join(names(models))
    return kind_of(annotation) + bounds_of(field)


def bounds_of(field: FieldInfo | None) -> str:
    """` in (0, 1)`, `, at least 1`, ` like /^[a-z]+$/`, or nothing."""
    bounds: dict[str, Any] = {}
    for rule in field.metadata if field else ():
        for name in (*SIGNS, "min_length", "pattern"):
            if getattr(rule, name, None) is not None:
                bounds[name] = getattr(rule, name)
    low = next((name for name in ("gt", "ge") if name in bounds), None)
    high = next((name for name in ("lt", "le") if name in bounds), None)
    if low and high:
        brackets = "(" if low == "gt" else "[", ")" if high == "lt" else "]"
        return f" in {brackets[0]}{number(bounds[low])}, {number(bounds[high])}{brackets[1]}"
    if low or high:
        name = str(low or high)
        return f", {SIGNS[name]} {number(bounds[name])}"
    if "pattern" in bounds:
        return f" like {bounds['pattern']}"
    return f", at least {bounds['min_length']} long" if "min_length" in bounds else ""
