"""Runs as the trainer and the evaluator leave them, with made-up figures, for what only reads."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from pipelines.home.home import Home
from rpg.recording.segments import SegmentWriter
from specs.records import EVALUATION, EvaluationRow, EvaluationSampleRow, MetricRow, RolloutRow, TokenRow, TurnRow

START = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
FINGERPRINT = "e" * 64
SPEC: dict[str, Any] = {
    "name": "sums",
    "question": "Does clipping help a small model learn to add?",
    "seeds": [0],
    "model": {"source": "scratch", "config": {"hidden_size": 64}},
    "data": {
        "train": [{"source": "expressions", "seed": 1, "size": 64}],
        "evaluation": [{"source": "expressions", "name": "two-terms", "seed": 2, "size": 60}],
    },
    "reward": {"type": "exact_match"},
    "objective": {"type": "rpg", "kl_coef": 0.01, "clip": {"type": "dual", "low": 0.2, "high": 0.28, "dual": 10.0}},
    "training": {
        "steps": 60,
        "prompts_per_step": 8,
        "group_size": 4,
        "optimizer": {"type": "adamw", "learning_rate": 1e-4},
    },
    "evaluation": {"confidence": 0.95, "samples_per_problem": 8},
}


def record_run(
    home: Home,
    run_id: str,
    *,
    seed: int = 0,
    values: Mapping[str, Any] | None = None,
    before: float = 0.45,
    after: float = 0.7,
    steps: int = 60,
    problems: int = 60,
    status: str = "finished",
    experiment: str = "sums",
    on_the_way: Mapping[int, float] | None = None,
    clusters: int = 0,
    graded: tuple[float | None] | None = None,
    luck: str = "",
    samples: int = 8,
) -> str:
    """One finished run whose accuracy moves from `before` to `after`, about; `on_the_way`: at steps between.

    Args:
        clusters: that the problems belong to; 0: none.
        graded: by a reward of about 10 where a response is right, and about 0 elsewhere, with its worst value.
        samples: of each problem in an evaluation.
        luck: by which its noise is drawn beside the seed; empty: by its id, which changes with the code.
    """
    directory, cell = home.run(run_id), dict(values or {})
    spec = json.loads(json.dumps(SPEC)) | {"seeds": [seed], "name": experiment}
    for path, value in cell.items():
        *parents, last = path.split(".")
        node = spec
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    name = " ".join([*(f"{path.split('.', 1)[1]}={value}" for path, value in cell.items()), f"seed {seed}"])
    known = {"run_id": run_id, "experiment": experiment, "name": name, "seed": seed, "values": cell}
    write(directory / "run.json", known | {"question": SPEC["question"], "created_at": START.isoformat()})
    write(directory / "spec.json", spec)
    write(directory / "state.json", _state(status))
    write(directory / "attempts/0001.json", {"attempt": 1, "resumed_from_step": 0, "started_at": START.isoformat()})
    rng = np.random.default_rng([seed, *map(ord, luck or run_id)])
    _training(directory, run_id, steps, before, after, rng)
    _evaluation(
        directory, run_id, problems, {0: before, **(on_the_way or {}), steps: after}, rng, clusters, graded, samples
    )
    return run_id


def change_spec(home: Home, run_id: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The run's spec with nested mappings laid over it, written and returned."""
    path = home.run(run_id) / "spec.json"
    spec = _laid_over(json.loads(path.read_text()), changes)
    write(path, spec)
    return spec


def _laid_over(spec: Any, changes: Any) -> Any:
    if not isinstance(spec, dict) or not isinstance(changes, Mapping):
        return changes
    return spec | {key: _laid_over(spec.get(key), value) for key, value in changes.items()}


def as_it_is(home: Home, run_id: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The run's spec as that of a model measured as it is, written and returned."""
    spec = change_spec(home, run_id, {"kind": EVALUATION, **(changes or {})})
    del spec["training"], spec["data"]["train"]
    write(home.run(run_id) / "spec.json", spec)
    return spec


def record_experiment(home: Home, run_ids: Sequence[str], experiment: str = "sums") -> None:
    """The experiment's own record, with these runs."""
    about = {"name": experiment, "question": SPEC["question"], "runs": list(run_ids), "current": list(run_ids)}
    write(home.experiment(experiment) / "experiment.json", about | {"created_at": START.isoformat()})


def record_two_cells(home: Home) -> list[str]:
    """Two clips x three seeds; the second is better."""
    run_ids = [
        record_run(home, f"sums-{clip}-s{seed}", seed=seed, values={"objective.clip.high": high}, after=after)
        for clip, high, after in (("narrow", 0.1, 0.62), ("wide", 0.28, 0.78))
        for seed in range(3)
    ]
    record_experiment(home, run_ids)
    return run_ids


def record_tokens(
    home: Home,
    run_id: str,
    *,
    steps: Sequence[int] = range(1, 11),
    responses: int = 8,
    length: int = 12,
    prompt: str = "12 + 30 =",
    text: str = "The sum is 42.\n",
    sampled: bool = True,
) -> None:
    """Rollouts of these steps and their tokens, each byte of the text one, again and again up to `length` tokens.

    Args:
        responses: of each step, in groups of four.
        sampled: whether the policy sampled the first token of each too.
    """
    rng = np.random.default_rng([len(run_id), *map(ord, run_id)])
    writer = SegmentWriter(home.run(run_id), run_id, 1)
    once = byte_tokenizer().encode(text).ids
    ids = [once[position % len(once)] for position in range(length)]
    said = byte_tokenizer().decode(ids)
    for step in steps:
        number, rewards = np.arange(responses), rng.random(responses) < 0.3 + 0.05 * step
        lengths = rng.integers(max(1, length // 2), length + 1, responses)
        writer.columns(
            RolloutRow,
            {
                "step": np.full(responses, step),
                "rollout_id": number,
                "prompt_id": "p",
                "group_id": number // 4,
                "prompt": prompt,
                "response": said,
                "reward": rewards.astype(float),
                "correct": rewards,
                "advantage": rewards - rewards.mean(),
                "num_tokens": lengths,
                "finish_reason": "stop",
                "policy_version": step - 1,
                "trained_version": step - 1,
                "reference_version": step // 8,
                "reward_error": pa.nulls(responses, pa.string()),
                "reward_terms": pa.nulls(responses, pa.string()),
                "verdicts": pa.nulls(responses, pa.string()),
            },
        )
        of = np.repeat(number, lengths)
        position = np.concatenate([np.arange(size) for size in lengths])
        old, moved = -rng.exponential(0.5, of.size), rng.normal(0, 0.02 + 0.002 * step, of.size)
        writer.columns(
            TokenRow,
            {
                "step": np.full(of.size, step),
                "rollout_id": of,
                "position": position,
                "token_id": np.array(ids)[position],
                "logprob": old + moved,
                "old_logprob": old,
                "rollout_logprob": old,
                "ref_logprob": old - 0.1,
                "ratio": np.exp(moved),
                "clipped": np.abs(moved) > 0.05,
                "entropy": rng.exponential(0.6, of.size),
                "sampled": sampled | (position > 0),
                "policy_version": step - 1,
            },
        )
    writer.flush()


def record_conversation(
    home: Home, run_id: str, turns: Sequence[Mapping[str, Any]], *, step: int = 1, tokens: bool = True
) -> None:
    """A response of several turns, whose tokens are the bytes of their texts.

    Args:
        turns: `text`, `sampled` and what else a row of `turns` has, in order.
        tokens: whether they are recorded.
    """
    columns = {"tool": pa.string(), "reward": pa.float64(), "error": pa.string(), "seconds": pa.float64()}
    ids = [byte_tokenizer().encode(turn["text"]).ids for turn in turns]
    sampled = np.repeat([turn["sampled"] for turn in turns], [len(part) for part in ids])
    writer = SegmentWriter(home.run(run_id), run_id, 1)
    writer.columns(
        RolloutRow,
        {
            "step": np.full(1, step),
            "rollout_id": np.zeros(1, int),
            "prompt_id": "p",
            "group_id": np.zeros(1, int),
            "prompt": "37*48=",
            "response": "".join(turn["text"] for turn in turns),
            "reward": np.ones(1),
            "correct": np.ones(1, bool),
            "advantage": np.full(1, 0.5),
            "num_tokens": np.full(1, sampled.sum()),
            "finish_reason": "stop",
            "policy_version": 0,
            "trained_version": 0,
            "reference_version": 0,
            "reward_error": pa.nulls(1, pa.string()),
            "reward_terms": pa.nulls(1, pa.string()),
            "verdicts": pa.nulls(1, pa.string()),
        },
    )
    writer.columns(
        TurnRow,
        {
            "step": np.full(len(turns), step),
            "rollout_id": np.zeros(len(turns), int),
            "turn": np.arange(len(turns)),
            "sampled": np.array([turn["sampled"] for turn in turns]),
            "text": [turn["text"] for turn in turns],
            "num_tokens": np.array([len(part) for part in ids]),
            "restart": np.array([turn.get("restart", False) for turn in turns]),
            **{name: pa.array([turn.get(name) for turn in turns], kind) for name, kind in columns.items()},
        },
    )
    if tokens:
        figures = pa.array(np.full(sampled.size, 0.5, np.float32), mask=~sampled)
        writer.columns(
            TokenRow,
            {
                "step": np.full(sampled.size, step),
                "rollout_id": np.zeros(sampled.size, int),
                "position": np.arange(sampled.size),
                "token_id": np.concatenate(ids),
                "clipped": pa.array(np.zeros(sampled.size, bool), mask=~sampled),
                "sampled": sampled,
                "policy_version": pa.array(np.full(sampled.size, step - 1, np.int32), mask=~sampled),
                **dict.fromkeys(
                    ("logprob", "old_logprob", "rollout_logprob", "ref_logprob", "ratio", "entropy"), figures
                ),
            },
        )
    writer.flush()


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def record_tokenizer(home: Home, run_id: str) -> None:
    """The tokenizer of `record_tokens`, where the run's record says that its base model is."""
    directory = home.artifact("base", "b" * 64)
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    known = json.loads((home.run(run_id) / "run.json").read_text())
    write(home.run(run_id) / "run.json", known | {"fingerprints": {"base": "b" * 64}})


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _state(status: str) -> dict[str, Any]:
    moments = [START + timedelta(seconds=offset) for offset in (0, 2.5, 64, 214, 243)]
    names = ("data", "base", "train", "evaluate")
    stages = {
        name: {
            "fingerprint": name[0] * 64,
            "status": "finished",
            "cached": name == "data",
            "started_at": begun.isoformat(),
            "ended_at": ended.isoformat(),
        }
        for name, begun, ended in zip(names, moments, moments[1:], strict=False)
    }
    ends = {"started_at": moments[0].isoformat(), "ended_at": moments[-1].isoformat()}
    reason = "" if status == "finished" else "ran out of memory"
    return {"status": status, "reason": reason, "evaluation": FINGERPRINT, "stages": stages, **ends}


def _training(directory: Path, run_id: str, steps: int, low: float, high: float, rng: np.random.Generator) -> None:
    writer = SegmentWriter(directory, run_id, 1)
    for step in range(1, steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        figures = {
            "reward/mean": low + (high - low) * done + rng.normal(0, 0.03),
            "kl/reverse": 0.02 * done * rng.uniform(0.7, 1.3),
            "entropy": 0.9 - 0.5 * done + rng.normal(0, 0.02),
            "clip_fraction/high": 0.01 * rng.random(),
            "clip_fraction/low": 0.006 * rng.random(),
            "grad_norm": 0.4 * rng.uniform(0.6, 1.5),
            "response_length/mean": 5 + 2 * done + rng.normal(0, 0.2),
            "learning_rate": 1e-4,
            "time/step": rng.uniform(0.3, 0.5),
            "tokens_per_second/train": rng.uniform(9e3, 1.2e4),
        }
        moment = START + timedelta(seconds=step)
        writer.rows([MetricRow(run_id, 1, step, name, float(value), moment) for name, value in figures.items()])
    writer.flush()


def _evaluation(
    directory: Path,
    run_id: str,
    problems: int,
    levels: Mapping[int, float],
    rng: np.random.Generator,
    clusters: int,
    graded: tuple[float | None] | None = None,
    num_samples: int = 8,
) -> None:
    writer = SegmentWriter(directory / "evaluate" / FINGERPRINT[:16], run_id, 1)
    difficulty = np.random.default_rng(0).normal(0, 0.2, problems)
    for step, level in levels.items():
        samples = [
            replace(
                _sample(run_id, step, problem, sample, bool(rng.random() < level + difficulty[problem])),
                cluster=f"passage {problem % clusters}" if clusters else None,
            )
            for problem in range(problems)
            for sample in range(num_samples)
        ]
        if graded:
            samples = [replace(row, correct=None, score=10 * row.score + rng.normal()) for row in samples]
        share = sum(row.score for row in samples) / len(samples)
        mean, ends = f"mean@{num_samples}", (share - 0.03, share + 0.03)
        row = EvaluationRow(run_id, FINGERPRINT, step, "two-terms", mean, share, *ends, problems, num_samples)
        if graded:
            row = replace(row, metric="score@8", worst=graded[0])
        writer.rows([row])
        writer.rows(samples)
    writer.flush()


def record_evaluated_conversation(
    home: Home, run_id: str, turns: Sequence[Mapping[str, Any]], *, step: int = 60, fingerprint: str = FINGERPRINT
) -> None:
    """A response of several turns in an evaluation, better than all others; turns as in `record_conversation`."""
    columns = ("sampled", "tool", "text", "reward", "error", "seconds")
    rows = [
        {"turn": place, "num_tokens": len(turn["text"]), **{name: turn.get(name) for name in columns}}
        for place, turn in enumerate(turns)
    ]
    sample = _sample(run_id, step, problem=0, sample=0, correct=True)
    writer = SegmentWriter(home.run(run_id) / "evaluate" / fingerprint[:16], run_id, 2)
    text = "".join(turn["text"] for turn in turns)
    told = {"fingerprint": fingerprint, "response": text, "score": 9.0, "turns": json.dumps(rows)}
    writer.rows([replace(sample, problem_id="talk", **told)])
    writer.flush()


def _sample(run_id: str, step: int, problem: int, sample: int, correct: bool) -> EvaluationSampleRow:
    left, right = 11 + problem, 88 - problem
    said = left + right if correct else left + right + 10
    return EvaluationSampleRow(
        run_id=run_id,
        fingerprint=FINGERPRINT,
        step=step,
        dataset="two-terms",
        problem_id=f"p{problem:03}",
        sample=sample,
        prompt=f"{left} + {right} =",
        response=f" {said}",
        answer=str(left + right),
        extracted=str(said),
        score=float(correct),
        correct=correct,
        num_tokens=4,
        finish_reason="stop",
        reward_error=None,
    )
