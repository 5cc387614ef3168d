"""Runs stages the way the supervisor does: a job file, a process, an exit code."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rpg.tiny_run import start

SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "source": "scratch",
        "config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 32,
        },
    },
    "data": {
        "train": [{"source": "reasoning_gym", "task": "chain_sum", "size": 200, "config": {"max_digits": 1}}],
        "evaluation": [
            {
                "source": "reasoning_gym",
                "name": "held_out",
                "task": "chain_sum",
                "size": 12,
                "seed": 100_000,
                "config": {"max_digits": 1},
            }
        ],
        "prompt": {"template": "{metadata.expression} ="},
        "overlap": "drop",
        "max_prompt_length": 24,
    },
    "warm_up": {"steps": 3, "batch_size": 16},
    "rollout": {"max_response_length": 6},
    "reward": {"type": "reasoning_gym"},
    "objective": {"type": "rpg"},
    "training": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
    "evaluation": {"samples_per_problem": 4},
    "resources": {"device": "cpu", "threads": 1},
}


@dataclass(frozen=True)
class Result:
    """The result of a stage's process."""

    code: int
    out: Path
    problems: list[dict[str, Any]]
    log: str
    """Its stdout and stderr."""


def job_of(stage: str, directory: Path, spec: dict[str, Any], **inputs: Path) -> dict[str, Any]:
    """The job that the supervisor would write; the stage fills `directory`/`stage`."""
    return {
        "stage": stage,
        "spec": spec,
        "inputs": {name: str(path) for name, path in inputs.items()},
        "out": str(directory / stage),
        "problems": str(directory / "problems.json"),
        "run_id": "r1",
        "fingerprint": "f" * 64,
    }


def run_stage(stage: str, directory: Path, spec: dict[str, Any], **inputs: Path) -> Result:
    """`python -m rpg.stage` with a job made of these."""
    job, file = job_of(stage, directory, spec, **inputs), directory / f"{stage}-job.json"
    file.write_text(json.dumps(job))
    process = start([sys.executable, "-m", "rpg.stage", str(file)])
    try:
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    problems = Path(job["problems"])
    found = json.loads(problems.read_text()) if problems.exists() else []
    return Result(process.returncode, Path(job["out"]), found, said)
