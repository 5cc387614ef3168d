"""Identity of a stage's result: flat data, hashed with the fingerprints of the stages that it reads.

Identity and execution are separate: a field declared with `execution` (ranks, ZeRO stage, retries, ...) never enters. A
file enters by its content, not by its name. Code enters by its results number, and by its digest if it differs from the
release.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pipelines.planning.code import Differences, release
from specs.machine.manifests import directory_digest, file_digest
from specs.schema.base import OpenSection
from specs.schema.experiment import Experiment
from specs.schema.model import PretrainedModel, ScratchModel, TrainedTokenizer

Identity = dict[str, Any]


def fingerprint(
    stage: str, identity: Identity, inputs: dict[str, str], code: Differences | None = None, *, results: int = 0
) -> str:
    """Returns the SHA-256, hexadecimal, of everything that makes a stage's result.

    Args:
        inputs: fingerprints of the stages that it reads.
        code: differences between its code and the release; an empty value is omitted from the hash.
        results: the results number of its code; 0: that of this release.
    """
    number = results or release().results[stage]
    payload: dict[str, Any] = {"stage": stage, "version": number, "identity": identity, "inputs": inputs}
    if code:
        payload["code"] = code
    text = json.dumps(payload, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def train_data_identity(experiment: Experiment) -> Identity:
    """Returns the identity of the training problems. It includes evaluation sets only if shared
    problems are dropped."""
    data = experiment.data
    parts: dict[str, Any] = {
        "train": [by_content(source) for source in data.train],
        "prompt": data.prompt.identity(),
        "deduplicate": data.deduplicate,
        "max_prompt_length": data.max_prompt_length,
    }
    if data.overlap == "drop":
        parts["overlap"] = "drop"
        parts["evaluation"] = [by_content(source) for source in data.evaluation]
    return flatten({"data": parts})


def data_identity(experiment: Experiment) -> Identity:
    """Returns the identity of the training and evaluation problems."""
    sets = [by_content(source) for source in experiment.data.evaluation]
    return train_data_identity(experiment) | flatten({"data": {"evaluation": sets, "overlap": experiment.data.overlap}})


def of_training_data(identity: Identity) -> Identity:
    """Returns the part of a `data_identity` that is the `train_data_identity`."""
    if identity.get("data.overlap") == "drop":
        return identity
    return {path: value for path, value in identity.items() if not path.startswith(("data.evaluation", "data.overlap"))}


def base_identity(experiment: Experiment) -> Identity:
    """Returns the identity of the policy before training."""
    model = experiment.model.identity()
    if isinstance(experiment.model, PretrainedModel) and Path(experiment.model.path).is_dir():
        model = {"source": "pretrained", "content": directory_digest(Path(experiment.model.path))}
    warm_up = experiment.warm_up.identity() if experiment.warm_up else None
    return flatten({"model": model, "warm_up": warm_up})


def base_reads_data(experiment: Experiment) -> bool:
    """Returns whether the base model is made with the help of the training problems."""
    model = experiment.model
    return experiment.warm_up is not None or (
        isinstance(model, ScratchModel) and isinstance(model.tokenizer, TrainedTokenizer)
    )


def train_identity(experiment: Experiment) -> Identity:
    """Returns the identity of a run's training, beside its data and its base model."""
    sections = ("rollout", "objective", "advantage", "reference", "training")
    parts: dict[str, Any] = {name: getattr(experiment, name).identity() for name in sections}
    parts["reward"] = by_content(experiment.reward)
    parts["rollout"] = _rollout(experiment)
    if (teacher := experiment.reference.teacher) and Path(teacher.path).is_dir():
        parts["reference"] = {"source": "model", "content": directory_digest(Path(teacher.path))}
    if order := experiment.data.identity().get("order"):
        parts["data"] = {"order": order}
    if every_steps := experiment.evaluation.every_steps:
        # Measurements during training are part of its result, and come from training alone.
        parts["evaluation"] = {"every_steps": every_steps}
    measures = ("data.train.", "data.evaluation.") if every_steps else ("data.train.",)
    parts |= {place: own for place, own in _own_rewards(experiment).items() if place.startswith(measures)}
    return flatten(parts | {"seeds": list(experiment.seeds)})


def without_seed(identity: Identity) -> Identity:
    """Returns the identity of a run's training without its seed: runs that share it are seeds of one cell."""
    return {path: value for path, value in identity.items() if path.partition(".")[0] != "seeds"}


def evaluate_identity(experiment: Experiment) -> Identity:
    """Returns the identity of a run's evaluation, beside its data and its weights."""
    evaluation, rollout = experiment.evaluation.identity(), _rollout(experiment)
    evaluation.pop("every_steps", None)
    if not experiment.evaluation.max_response_length:
        evaluation["max_response_length"] = experiment.rollout.max_response_length
    return flatten(
        {
            "evaluation": evaluation,
            "reward": by_content(experiment.reward),
            "rollout": {name: rollout[name] for name in ("engine", "rollouter") if name in rollout},
        }
        | {place: own for place, own in _own_rewards(experiment).items() if place.startswith("data.evaluation.")}
    )


def _rollout(experiment: Experiment) -> dict[str, Any]:
    """Returns the identity of the way responses are sampled, with the environment's files by their content."""
    rollout = experiment.rollout.identity()
    own: dict[str, Any] = {}
    if "rollouter" in rollout:
        own["rollouter"] = by_content(experiment.rollout.rollouter)
    if "partial" in rollout:
        own["partial"] = experiment.in_flight
    return rollout | own


def _own_rewards(experiment: Experiment) -> dict[str, Any]:
    """Returns the rewards that single sets of problems name instead of the common reward, by path, such as
    `data.train.0.reward`; empty if no set has one."""
    return {f"{place}.reward": by_content(reward) for place, reward in experiment.own_rewards.items()}


def report_identity(experiment: Experiment) -> Identity:
    """Returns the identity of a run's page, beside its results."""
    return {"name": experiment.name, "question": experiment.question}


def flatten(value: Any, prefix: str = "") -> Identity:
    """Flattens nested data to {"objective.clip.low": 0.2, "data.train.0.task": ...}. An empty container stays as it
    is."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: Identity = {}
    for key, item in items:
        flat |= flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat


def by_content(section: OpenSection) -> dict[str, Any]:
    """Returns the identity of a source or a reward. Files on this machine that it names count by their content."""
    plain = section.identity()
    for where, _, path in section.paths():
        if Path(path).is_file():
            content = file_digest(Path(path))
        elif Path(path).is_dir():
            content = directory_digest(Path(path))
        else:
            continue
        *sections, last = where
        holder: Any = plain
        for part in sections:
            holder = holder[part]
        holder[last] = {"content": content}
    return plain
