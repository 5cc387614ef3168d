"""A run that is trained to its seventh step, set back by its `Keeper` alone, and trained to its end."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rpg.checkpoints.checkpoint import Checkpoints
from rpg.checkpoints.retention import Retention
from rpg.components import open_components
from rpg.processes import ranks
from rpg.processes.stopping import StopAfterStep
from rpg.recording.progress import ProgressFile
from rpg.recording.run_directory import RunDirectory
from rpg.recording.segments import SegmentWriter
from rpg.rollouts.source import RolloutSource
from rpg.run_recorder.recorder import RunRecorder
from rpg.run_recorder.state import TrainingState
from rpg.trainer import Trainer
from specs.machine.fence import Fence
from tests.rpg.tiny_run import rows


def main(run_dir: Path) -> int:
    """Leaves set_back.json: how all stood before, after a setting back that found nothing, and after one that did."""
    ranks.join("cpu")
    torch.set_num_threads(1)
    run, state, stop = RunDirectory(run_dir), TrainingState(), StopAfterStep()
    with open_components(run, run.spec(), torch.device("cpu")) as components, RolloutSource(components) as source:
        training = components.spec.training
        fence = Fence(run_dir, 0)
        checkpoints = Checkpoints(run.checkpoints, Retention.of(training.checkpoint), fence)
        writer = SegmentWriter(run_dir, run_dir.name, run.new_attempt(0, fence))
        recorder = RunRecorder(components, source, checkpoints, writer, fence)
        trainer = Trainer(
            components, source, state, recorder, ProgressFile(run, fence, steps=training.steps, speaks=False)
        )
        trainer.until = 7
        trainer.train(stop)
        seen = [standing(run, state, checkpoints, components.sampler.policy_version)]
        (checkpoints.path(6) / "trainer.json").write_text("{}")
        for up_to in (2, 6):
            found = recorder.roll_back(state, up_to=up_to)
            seen.append(standing(run, state, checkpoints, components.sampler.policy_version) | {"found": found})
        trainer.until = 0
        trainer.train(stop)
        recorder.finish(state, run.inputs()["fingerprint"])
    (run_dir / "set_back.json").write_text(json.dumps(seen))
    ranks.leave()
    return 0


def standing(run: RunDirectory, state: TrainingState, checkpoints: Checkpoints, loaded: int) -> dict[str, Any]:
    """Returns the state that setting back changes."""
    return {
        **asdict(state),
        "loaded": loaded,
        "checkpoints": checkpoints.published(),
        "recorded": sorted({row["step"] for row in rows(run.path, "tokens")}),
        "attempts": len(list((run.path / "attempts").iterdir())),
    }
