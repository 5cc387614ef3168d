"""Homes as runs leave them, made with the trainer's own writer."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rpg.recording.segments import SegmentWriter, schema_of
from specs.records import TABLES, CheckpointRow, EvaluationRow, EvaluationSampleRow, MetricRow, RolloutRow, TokenRow
from specs.segment_names import DigestedFile

NOON = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
FINGERPRINT = "e" * 64
SPEC: dict[str, Any] = {
    "name": "sums",
    "model": {"source": "scratch"},
    "data": {"train": [{"source": "expressions", "seed": 1, "size": 64}]},
    "reward": {"type": "exact_match"},
    "objective": {"type": "rpg"},
    "training": {"steps": 3, "prompts_per_step": 1, "group_size": 2},
}
"""A spec with what every run's has."""


class RecordedRun:
    """One run's directory, written step by step."""

    def __init__(
        self, root: Path, run_id: str, *, status: str = "finished", seed: int = 0, experiment: str = "sums"
    ) -> None:
        self.run_id = run_id
        self.path = root / "runs" / run_id
        self.state = {
            "status": status,
            "started_at": "2026-11-20T12:00:00.000+00:00",
            "ended_at": "2026-11-20T12:10:00.000+00:00",
            "reason": "",
            "evaluation": None,
            "stages": {
                "data": {"fingerprint": "d" * 64, "status": "finished", "cached": True},
                "train": {"fingerprint": "a" * 64, "status": status, "cached": False},
            },
        }
        identity = {
            "run_id": run_id,
            "experiment": experiment,
            "name": f"kl_coef=0.01 seed={seed}",
            "seed": seed,
            "values": {"objective.kl_coef": 0.01},
            "question": "Does it add?",
            "created_at": "2026-11-20T11:59:00.000+00:00",
            "fingerprints": {"data": "d" * 64, "train": "a" * 64},
            "objective": "rpg",
        }
        write_json(self.path / "run.json", identity)
        write_json(self.path / "spec.json", SPEC | {"name": experiment, "seeds": [seed]})
        self.save()
        self.attempt = 0
        self.writer = SegmentWriter(self.path, run_id, 0)

    def save(self) -> None:
        """Replaces state.json."""
        write_json(self.path / "state.json", self.state)

    def plan(self, seed: int, trained_with: dict[str, Any], *, results: int = 1) -> None:
        """The plan that the run was last executed by.

        Args:
            trained_with: fields of its spec beside the seed.
            results: the results number of training.
        """
        stages: dict[str, dict[str, Any]] = {
            "train": {
                "results": results,
                "identity": {**trained_with, "seeds.0": seed},
                "inputs": {"data": "d" * 64, "base": "b" * 64},
            },
            "evaluate": {
                "results": 1,
                "identity": {"evaluation.seed": 0},
                "inputs": {"data": "d" * 64, "train": f"{seed:064}"},
            },
        }
        write_json(self.path / "plan.json", {"run_id": self.run_id, "seed": seed, "values": {}, "stages": stages})
        self.save()

    def start(self, attempt: int, resumed_from_step: int = 0, *, lease: int = 0) -> None:
        """A start of the trainer."""
        document = {"attempt": attempt, "resumed_from_step": resumed_from_step, "started_at": NOON.isoformat()}
        document |= {"lease": lease} if lease else {}
        write_json(self.path / "attempts" / f"{attempt:04}.json", document)
        self.attempt = attempt
        self.writer = SegmentWriter(self.path, self.run_id, attempt)

    def step(self, step: int, *, reward: float = 0.5, rollouts: int = 2, tokens: int = 3) -> None:
        """The rows of one step, not flushed."""
        values = {"reward/mean": reward, "reward/std": 0.1, "entropy": 1.0}
        self.writer.columns(
            MetricRow, {"step": [step] * 3, "name": list(values), "value": list(values.values()), "recorded_at": NOON}
        )
        self.writer.columns(RolloutRow, rollout_columns(step, rollouts, tokens, reward))
        self.writer.columns(TokenRow, token_columns(step, rollouts, tokens))
        self.writer.event(step, "stepped", f"step {step}")

    def flush(self) -> None:
        """The rows so far become segments."""
        self.writer.flush()

    def steps(self, first: int, last: int, *, each: int = 1, reward: float = 0.5) -> None:
        """Steps first..last, a segment for every `each` of them."""
        for step in range(first, last + 1):
            self.step(step, reward=reward)
            if (step - first + 1) % each == 0 or step == last:
                self.flush()

    def checkpoint(self, step: int) -> None:
        """A row that names a checkpoint."""
        row = CheckpointRow(self.run_id, self.attempt, step, f"checkpoints/step-{step:06}", "full", 4096, NOON)  # type: ignore[arg-type]
        self.writer.rows([row])
        self.flush()

    def evaluate_on_the_way(self, step: int, accuracy: float, fingerprint: str = FINGERPRINT) -> None:
        """Records the present attempt's metrics of a step, flushed."""
        base = (self.run_id, fingerprint, step, "sums")
        measure = EvaluationRow(*base, "mean@8", accuracy, 0.0, 1.0, 200, 8, self.attempt)  # type: ignore[arg-type]
        texts = ("1+1=", str(accuracy), "2", None)
        sample = EvaluationSampleRow(*base, "p1", 0, *texts, 1.0, True, 2, "stop", None, self.attempt)  # type: ignore[arg-type]
        self.writer.rows([measure])
        self.writer.rows([sample])
        self.flush()

    def evaluate(self, fingerprint: str = FINGERPRINT, *, accuracy: float = 0.7, current: bool = True) -> None:
        """A published evaluation of step 0 and step 10 on one set."""
        directory = self.path / "evaluate" / fingerprint[:16]
        base = (self.run_id, fingerprint)
        rows = [
            EvaluationRow(*base, 0, "sums", "mean@8", 0.4, 0.35, 0.45, 200, 8),  # type: ignore[arg-type]
            EvaluationRow(*base, 10, "sums", "mean@8", accuracy, accuracy - 0.05, accuracy + 0.05, 200, 8),  # type: ignore[arg-type]
        ]
        sample = EvaluationSampleRow(
            *base,
            10,
            "sums",
            "p1",
            0,
            "1+1=",
            "2",
            "2",
            "2",
            1.0,
            True,
            2,
            "stop",
            None,  # type: ignore[arg-type]
        )
        write_rows(directory / "segments" / "evaluations" / "evaluations.parquet", "evaluations", rows)
        write_rows(directory / "segments" / "evaluation_samples" / "samples.parquet", "evaluation_samples", [sample])
        write_json(directory / "manifest.json", {"stage": "evaluate", "fingerprint": fingerprint, "files": {}})
        if current:
            self.state["evaluation"] = fingerprint
            self.save()


def segment(run: RecordedRun, table: str, first: int, last: int = 0) -> Path:
    """The segment that the run's first attempt wrote of these steps."""
    (path,) = (run.path / "segments" / table).glob(f"a0001-s{first:06}-{last or first:06}*.parquet")
    return path


def rewritten(path: Path, rows: pa.Table) -> Path:
    """The segment with other rows, as another version may have written it."""
    path.unlink()
    with DigestedFile(path) as file:
        pq.write_table(rows, file)
        digest = file.digest
    return path.rename(path.with_name(f"{path.name.rpartition('-')[0]}-{digest}.parquet"))


def write_rows(path: Path, table: str, rows: Sequence[Any]) -> None:
    """Rows of one class as a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema_of(TABLES[table])), path)


def write_json(path: Path, value: Any) -> None:
    """A document, replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(value), encoding="utf-8")
    aside.replace(path)


def rollout_columns(step: int, rollouts: int, tokens: int, reward: float) -> dict[str, Any]:
    """Returns rows of `rollouts`: this many responses of this many tokens each."""
    return {
        "step": [step] * rollouts,
        "rollout_id": list(range(rollouts)),
        "prompt_id": [f"p{index // 2}" for index in range(rollouts)],
        "group_id": [index // 2 for index in range(rollouts)],
        "prompt": "1+1=",
        "response": [f"{step}.{index}" for index in range(rollouts)],
        "reward": [reward] * rollouts,
        "correct": True,
        "advantage": 0.0,
        "num_tokens": [tokens] * rollouts,
        "finish_reason": "stop",
        "policy_version": step - 1,
        "trained_version": step - 1,
        "reference_version": 0,
        "reward_error": None,
        "reward_terms": None,
        "verdicts": None,
    }


def token_columns(step: int, rollouts: int, tokens: int) -> dict[str, Any]:
    """Their rows of `tokens`."""
    count = rollouts * tokens
    return {
        "step": [step] * count,
        "rollout_id": [index // tokens for index in range(count)],
        "position": [index % tokens for index in range(count)],
        "token_id": list(range(count)),
        "logprob": [-0.5] * count,
        "old_logprob": -0.5,
        "rollout_logprob": -0.5,
        "ref_logprob": -0.75,
        "ratio": 1.0,
        "clipped": False,
        "entropy": 1.0,
        "sampled": True,
        "policy_version": step - 1,
    }


def flip(path: Path, place: int) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
