"""Lookup in the schema by paths: fields and their allowed values. It walks annotations, including unions."""

import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specs.errors import Issue, IssueError, Path
from specs.extensions import find_variant, variants
from specs.schema.base import is_open, item_of


def members(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of an annotation, with Annotated and unions unpacked and None removed."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in members(part))
    return () if annotation is type(None) else (annotation,)


def is_model(annotation: Any) -> bool:
    """Returns whether the type is a section of the schema."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def literal_of(field: FieldInfo) -> tuple[Any, ...]:
    """Returns the values that a Literal field may have; empty for other fields."""
    return tuple(value for part in members(field.annotation) if get_origin(part) is Literal for value in get_args(part))


def tag_of(models: Iterable[type[BaseModel]]) -> str | None:
    """Returns the field whose value distinguishes these models, if there is one."""
    sections = list(models)
    for name in ("type", "source", "engine"):
        if sections and all(name in model.model_fields for model in sections):
            return name
    return None


def choose(annotation: Any, tag: Any) -> type[BaseModel] | None:
    """Returns the model, in a union, whose tag field has this value, if there is one."""
    models = [part for part in members(annotation) if is_model(part)]
    name = tag_of(models)
    if name is None:  # a union whose members differ by a required key, such as a study's ranges
        return next((model for model in models if tag in _required(model)), None)
    return next((model for model in models if tag in literal_of(model.model_fields[name])), None)


def sections_of(annotations: Iterable[Any], data: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Returns the possible models of a section's data: the one that its tag selects, or all if it selects none."""
    models = [annotation for annotation in annotations if is_model(annotation)]
    if len(models) == 1 and is_open(models[0]):
        with suppress(IssueError):
            return [find_variant(models[0], data.get(models[0].tag))]
    tag = tag_of(models)
    chosen = [model for model in models if tag and data.get(tag) in literal_of(model.model_fields[tag])]
    for kind in (model for model in models if is_open(model) and not chosen):  # from an installed package
        with suppress(IssueError):
            return [find_variant(kind, data.get(kind.tag))]
    return chosen or models


def _required(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def below(annotations: Iterable[Any], part: str | int) -> tuple[Any, ...]:
    """Returns the alternatives for the value under `part`; empty if no value can be there."""
    alternatives: list[Any] = []
    for annotation in sorted(annotations, key=is_open):
        if is_open(annotation) and alternatives:  # built-in variants have it: skip the packages
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
    """Returns the models that have the field: this one, or variants of an open section."""
    if field in model.model_fields or not is_open(model):
        return [model] if field in model.model_fields else []
    for installed in (False, True):
        having = [one for one in variants(model, installed=installed).values() if field in one.model_fields]
        if having:
            return having
    return []


def names(annotations: Iterable[Any]) -> list[str]:
    """Returns the names of the fields allowed here, sorted."""
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
    """Returns the entries of a section that remain valid once `key` has this value.

    The result is empty if a new `source`, or a new `type` that chooses between classes, replaces the section. A new
    `engine` keeps it. An open section with a new `type` keeps the entries that all its variants share.
    """
    if key not in section or read(section[key]) == value:
        return dict(section)
    # If the surrounding section is not known yet, alternatives without such a field may also match.
    models = [annotation for annotation in annotations if is_model(annotation) and key in annotation.model_fields]
    chosen_by = [model for model in models if literal_of(model.model_fields[key])]
    kinds = [model for model in models if is_open(model) and model.tag == key and not chosen_by]
    if key == "type" and kinds:
        return {name: item for name, item in section.items() if name in kinds[0].model_fields}
    switches = (key == "source" and (kinds or chosen_by)) or (key == "type" and len(chosen_by) > 1)
    return {} if switches else dict(section)


def kept_in_another(annotations: Iterable[Any], section: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns the entries of a section that remain once `key`, which chooses its class, has this value.

    An entry remains if the new class has the field, also in sections below: another objective keeps `kl_coef` and the
    margins of its clip, but not `divergence`.
    """
    if key not in section or section[key] == value:
        return dict(section)
    # If the surrounding section is not known yet, alternatives without such a field may also match.
    models = [annotation for annotation in annotations if is_model(annotation) and key in annotation.model_fields]
    kept = _fields_of(models, {**section, key: value})
    return {name: item for name, item in kept.items() if name != key}


def _fields_of(annotations: Iterable[Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are fields of the class that the section's tag chooses."""
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
    """Returns whether data sets the value at the path, directly or through the short form of an enclosing section."""
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


_OURS = {
    "name": "run_name experiment_name exp_name",
    "seeds": "seed random_seed",
    "sinks": "report_to logger wandb project_name",
    "model.path": "model_name_or_path model_name pretrained_model_name_or_path",
    "data.train": "dataset_name train_dataset train_files dataset env environments",
    "data.evaluation": "eval_dataset val_files test_files",
    "data.order": "shuffle shuffle_dataset data_seed",
    "data.prompt.system": "system_prompt",
    "data.prompt.enable_thinking": "chat_template_kwargs apply_chat_template_kwargs",
    "reward": "reward_funcs reward_function rewards custom_reward_function reward_model",
    "reward.overlong": "overlong_buffer overlong_buffer_cfg",
    "rollout.engine": "use_vllm",
    "rollout.engines": "num_infer_gpus",
    "rollout.sleep": "vllm_enable_sleep_mode free_cache_engine",
    "rollout.placement": "vllm_mode",
    "rollout.max_response_length": "max_completion_length max_new_tokens max_tokens max_completion_tokens "
    "generate_max_len",
    "rollout.memory_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.tensor_parallel_size": "tensor_model_parallel_size vllm_tensor_parallel_size tp",
    "rollout.max_concurrent": "max_inflight_rollouts max_num_seqs",
    "rollout.max_staleness": "max_async_level async_level max_off_policy_steps",
    "rollout.partial": "partial_rollout partial_rollouts",
    "rollout.correction": "vllm_importance_sampling_correction rollout_is",
    "rollout.correction.type": "vllm_importance_sampling_mode truncated_importance_sampling_type",
    "rollout.correction.low": "vllm_importance_sampling_clip_min truncated_importance_sampling_ratio_min",
    "rollout.correction.high": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold "
    "truncated_importance_sampling_ratio",
    "rollout.dynamic_sampling": "filter_groups",
    "rollout.dynamic_sampling.oversampling": "oversampling_factor",
    "objective.type": "adv_estimator",
    "objective.kl_coef": "beta kl_beta kl_loss_coef init_kl_coef kl_penalty kl_tau kl_ctrl",
    "objective.kl_estimator": "kl_loss_type",
    "objective.kl_in": "use_kl_in_reward use_kl_loss",
    "objective.kl_weighted": "use_bias_correction_kl",
    "objective.level": "importance_sampling_level",
    "objective.aggregation": "loss_agg_mode",
    "objective.clip.low": "epsilon epsilon_low clip_eps cliprange clip_low clip_ratio clip_ratio_low",
    "objective.clip.high": "epsilon_high clip_higher clip_high clip_ratio_high",
    "objective.clip.dual": "delta clip_ratio_c",
    "advantage.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "advantage.rewards": "multi_objective_aggregation",
    "reference.update": "sync_ref_model",
    "reference.update.every_steps": "ref_model_sync_steps",
    "training.steps": "max_steps num_steps total_steps train_steps total_training_steps",
    "training.prompts_per_step": "train_batch_size per_device_train_batch_size rollout_batch_size",
    "training.group_size": "n num_generations n_samples num_samples rollout_n samples_per_prompt rollouts_per_example",
    "training.epochs": "num_iterations ppo_epochs num_epochs",
    "training.minibatches": "steps_per_generation",
    "training.microbatch_tokens": "ppo_max_token_len_per_gpu use_dynamic_bsz",
    "training.mask_truncated": "mask_truncated_completions",
    "training.entropy_coef": "entropy_coeff",
    "training.precision": "bf16 fp16 torch_dtype dtype",
    "training.kernels": "use_liger_kernel use_liger",
    "training.packing": "use_remove_padding",
    "training.offload": "param_offload optimizer_offload",
    "training.zero_stage": "deepspeed fsdp fsdp_config",
    "training.gradient_checkpointing": "enable_gradient_checkpointing",
    "training.attention": "attn_implementation",
    "training.lora": "peft_config use_peft",
    "training.lora.rank": "lora_r lora_rank",
    "training.lora.alpha": "lora_alpha",
    "training.lora.target_modules": "lora_target_modules",
    "training.ranks": "n_gpus_per_node num_train_gpus",
    "training.sequence_parallel_size": "ulysses_sequence_parallel_size",
    "training.optimizer": "optim",
    "training.optimizer.learning_rate": "lr actor_lr",
    "training.optimizer.weight_decay": "wd",
    "training.optimizer.betas": "adam_beta1 adam_beta2 betas1 betas2",
    "training.optimizer.epsilon": "adam_epsilon",
    "training.optimizer.max_grad_norm": "grad_clip max_norm clip_grad",
    "training.schedule.type": "lr_scheduler_type lr_scheduler",
    "training.schedule.warmup_updates": "warmup_steps lr_warmup_steps",
    "training.checkpoint": "ckpt",
    "training.checkpoint.every_steps": "save_steps save_freq save_strategy",
    "training.checkpoint.keep_last": "save_total_limit",
    "evaluation": "eval val_kwargs",
    "evaluation.every_steps": "eval_steps test_freq eval_strategy evaluation_strategy",
    "evaluation.samples_per_problem": "num_generations_eval",
    "launcher.nodes": "nnodes num_nodes",
    "cuda": "gpu gpus",
    "unnormalized_reverse": "urkl",
    "unnormalized_forward": "ufkl",
    "reverse": "rkl",
    "forward": "fkl",
}
"""Path of a field, or value -> its names in TRL, verl, prime-rl and papers."""
_OTHER_NAMES = {other: ours for ours, others in _OURS.items() for other in others.split()}
_INSTEAD = {
    "ssh": "several machines are a Ray cluster: `ray start` on each, then launcher: {type: ray} (docs/clusters.md)",
    "population": "search the points of a schedule, objective.kl_coef.schedule.1.1: {float: [...]} (docs/studies.md)",
    "ppo_mini_batch_size": "`training.minibatches` is the number of updates per step, not their size",
    "ref_model_mixup_alpha": "`reference.update.ema_decay` is the share that is kept: 1 - alpha",
    "seq_len": "two limits, in tokens: `data.max_prompt_length` and `rollout.max_response_length`",
    "batch_size": "a step has `training.prompts_per_step` x `training.group_size` responses",
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_steps_ratio"), "a number of updates: `training.schedule.warmup_updates`"
    ),
    "loss_type": "an objective with its published aggregation, `objective.type`, or `objective.aggregation` alone",
    "reward_weights": "`weight` of each term of `reward: {type: weighted_sum}`",
    **dict.fromkeys(
        ("vllm_max_model_length", "max_model_len"),
        "the sum of two limits, in tokens: `data.max_prompt_length` and `rollout.max_response_length`",
    ),
    **dict.fromkeys(("logging_steps", "log_completions"), "leave it out: every step and every response is recorded"),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "val_batch_size", "log_prob_micro_batch_size_per_gpu", "max_num_batched_tokens"),
        "leave it out: batches that only memory limits are chosen here",
    ),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "leave it out: `rpg push RUN --to ID` afterwards"),
    "val_before_train": "leave it out: the model before training is always evaluated",
    **dict.fromkeys(
        ("filter_overlong_prompts", "truncation"),
        "leave it out: prompts longer than \
`data.max_prompt_length` are not trained on",
    ),
    **dict.fromkeys(("prompt_key", "reward_fn_key"), "`columns` of a data set: {prompt: COLUMN, answer: COLUMN}"),
    "trust_remote_code": "leave it out: a model's own code is never run (docs/own-model.md)",
    **dict.fromkeys(("gamma", "lam", "critic_warmup"), "leave it out: no critic is trained, and nothing discounted"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
        "leave it out: microbatches are packed to `training.microbatch_tokens` tokens",
    ),
    **dict.fromkeys(
        ("num_train_epochs", "total_epochs"), "`training.steps` counts batches of `training.prompts_per_step` prompts"
    ),
    **dict.fromkeys(("output_dir", "default_local_dir"), "leave it out: RPG_HOME names the directory of all runs"),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_mode"), "leave it out: `rpg run` again resumes, as `rpg resume`"
    ),
}
"""Keys of earlier versions or other frameworks that have no single counterpart -> advice on what to write instead."""


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.6, *, root: Any = None, here: str = "") -> str:
    """Returns a hint that names the closest allowed word, ignoring case, or our word for another framework's or an
    earlier version's name; empty if no word is close.

    Args:
        root: for a field, the schema of the whole file, to find the field in other sections.
        here: the field's own path, which is no other place.

    >>> nearest("GRPO", ["ppo", "grpo"]), nearest("beta", ["kl_coef", "type"])
    ('did you mean `grpo`?', 'did you mean `kl_coef`?')
    """
    known = {each.lower(): each for each in allowed}
    if word in _INSTEAD and word not in known:
        return _INSTEAD[word]
    place, places = _OTHER_NAMES.get(word.lower(), ""), [each for each in elsewhere(word.lower(), root) if each != here]
    meant = place.rpartition(".")[2] or word.lower()
    word = word.lower()
    if meant in known and (word in known or not places or _is_section(root, place, known)):
        return f"did you mean `{known[meant]}`?"
    is_typo = not place and any(each.startswith(word) or word.startswith(each) for each in known)
    close = difflib.get_close_matches(meant, known, n=1, cutoff=cutoff)
    if places and not (is_typo and close):
        return f"here it is {' or '.join(f'`{each}`' for each in places)}"
    return f"did you mean `{known[close[0]]}`?" if close else ""


def _is_section(root: Any, place: str, known: Mapping[str, str]) -> bool:
    """Returns whether a field's dotted path leads to the section that allows these names."""
    here: tuple[Any, ...] = (root,)
    for part in place.split(".")[:-1]:
        here = below(here, part)
    return {*known} <= {*names(here)}


def is_anothers(word: str) -> bool:
    """Returns whether a word is a key of other frameworks or earlier versions."""
    return word in _OTHER_NAMES or word in _INSTEAD


def elsewhere(word: str, root: Any) -> list[str]:
    """Returns at most three dotted paths at which a schema has the field that a word names. The word may be ours or
    another framework's."""
    if not is_model(root):
        return []
    there, meant = _paths_by_name(root), _OTHER_NAMES.get(word, word)
    targets = [path for path in _OURS if path.rpartition(".")[2] == meant]
    main = meant if "." in meant or len(targets) != 1 else targets[0]
    paths = there.get(main.rpartition(".")[2], [])
    return [main] if main in paths else paths[:3]


@cache
def _paths_by_name(root: type[BaseModel]) -> dict[str, list[str]]:
    """Returns name -> dotted paths of the fields with that name, nearest to the root first. Fields inside lists are
    left out."""
    found = {".".join(path): path[-1] for path in sorted(_paths((root,), ()), key=len)}
    return {name: [path for path, last in found.items() if last == name] for name in set(found.values())}


def _paths(annotations: Iterable[Any], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for section in filter(is_model, annotations):
        for name, field in section.model_fields.items():
            yield (*above, name)
            yield from _paths(members(field.annotation), (*above, name))


DOTTED_BELOW = (("matrix", "product"), ("matrix", "zip"), ("overrides",), ("parameters",))
"""Mappings whose keys are themselves paths."""


def split(text: str) -> Path:
    """Returns `data.train.0.size` as a path. Whole numbers are indices into a list, and a path in a matrix stays one
    key.

    >>> split("data.train.0.size"), split("matrix.product.objective.kl_coef")
    (('data', 'train', 0, 'size'), ('matrix', 'product', 'objective.kl_coef'))
    """
    parts = text.split(".")
    for prefix in DOTTED_BELOW:
        if tuple(parts[: len(prefix)]) == prefix and len(parts) > len(prefix):
            return (*prefix, ".".join(parts[len(prefix) :]))
    return tuple(int(part) if part.isdecimal() and len(part) < 10 else part for part in parts)


def unknown(root: type[BaseModel], path: Path) -> Issue | None:
    """Returns an issue if the schema does not have the path; else None."""
    here: tuple[Any, ...] = (root,)
    for index, part in enumerate(path):
        under = below(here, part)
        if not under:
            allowed = names(here)
            if not allowed:
                listed = any(get_origin(annotation) in (list, tuple) for annotation in here)
                numbered = ".".join(map(str, (*path[:index], 0, *path[index:])))
                return Issue("has no fields", path[:index], hint=f"items have numbers: `{numbered}`" if listed else "")
            hint = nearest(str(part), allowed, root=root)
            last = str(path[-1])
            if index + 1 < len(path) and (is_anothers(last) or not hint):
                hint = nearest(last, (), root=root)
            return Issue("unknown field", path[: index + 1], allowed=", ".join(allowed), hint=hint)
        here = under
    return None


def item_at(data: Any, path: Path) -> Any:
    """Returns the value at a path of plain data; None if there is no value."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.get(str(part)) if isinstance(data, Mapping) else None
    return data


def no_such_item(data: Any, path: Path) -> Issue | None:
    """Returns an issue if a path leads beyond the end of a list of `data`, or into a missing list; else None."""
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
    """Returns the number as text, without `.0` for whole numbers."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def kind_of(annotation: Any) -> str:
    """Describes the kind of a value."""
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
    """Returns the allowed values of a field: `a number in (0, 1)`, `a whole number, at least 1`, `dual, none`, a
    section's fields."""
    models = [part for part in members(annotation) if is_model(part)]
    if field and (values := literal_of(field)):
        flags = ("true", "false") if bool in members(annotation) else ()
        sections = [f"or the fields {', '.join(names(models))}"] if models else []
        return ", ".join([*flags, *map(str, values), *sections])
    if models:
        return "the fields " + ", ".join(names(models))
    return kind_of(annotation) + bounds_of(field)


def bounds_of(field: FieldInfo | None) -> str:
    """Returns the bounds of a field: ` in (0, 1)`, `, at least 1`, ` like /^[a-z]+$/`, or an empty text."""
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
