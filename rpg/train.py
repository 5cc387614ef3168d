"""The trainer process: `python -m rpg.train RUN_DIR`, alone or as one of several ranks.

Exit codes: 0 trained to the end, or to the step at which it had to pause; 1 a failure; 2 spec, data or model are wrong,
as RUN_DIR/problems.json says; 143 stopped on request, with its state saved.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpg.processes.stopping import StopAfterStep
from specs.errors import SpecError
from specs.machine.exit_cause import STOPPED, USER_ERROR, EarlyExit, cause_of, leave_issues, note_exit
from specs.machine.fence import SupersededError
from specs.machine.parent import before_torch, die_with_parent
from specs.machine.standstill import watch_for_standstill
from specs.machine.timed_output import time_output

if TYPE_CHECKING:
    from rpg.components import TrainerComponents
    from rpg.recording.run_directory import RunDirectory
    from rpg.rollouts.source import RolloutSource
    from specs.schema.experiment import Experiment


def main(run_dir: Path) -> int:
    """Trains the run from the beginning or from its last checkpoint, and returns the exit code."""
    die_with_parent()
    before_torch()
    stop = StopAfterStep()
    started = time.monotonic()
    from rpg.recording.run_directory import RunDirectory
    from specs.machine.files import DiskError, explained

    run = RunDirectory(run_dir.absolute())
    try:
        with explained(run.path):
            return _train(run, stop, started)
    except DiskError as error:
        note_exit(run.path, EarlyExit("disk_full", str(error)))
        print(f"train: {error}", file=sys.stderr)
        return 1
    except SpecError as error:
        leave_issues(run.path / "problems.json", error.issues)
        print(f"train: {error}", file=sys.stderr)
        return USER_ERROR
    except SupersededError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        note_exit(run.path, EarlyExit(cause_of(error), str(error)))
        raise


def _train(run: "RunDirectory", stop: StopAfterStep, started: float) -> int:
    """Joins the other ranks, opens the trainer's components and trains. Returns the exit code."""
    spec, inputs = run.spec(), run.inputs()
    spec = with_budget(spec, inputs.get("microbatch_tokens", 0)).sharing_memory(inputs.get("sharing", {}))
    if run.trained(inputs["fingerprint"]):
        print(f"train: {run.path} is trained already", file=sys.stderr)
        return 0
    watch_for_standstill(run.path, spec.stages.train.standstill_seconds)
    import transformers

    from rpg.components import open_components
    from rpg.processes import ranks
    from rpg.processes.device import choose_device, use_threads
    from rpg.processes.numa import bind_to_gpu
    from rpg.rollouts.source import RolloutSource

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # DeepSpeed 0.19 still calls torch's collectives by their old names.
    warnings.filterwarnings("ignore", r".*is deprecated. Please use `torch.distributed", FutureWarning)
    device = choose_device(spec.resources)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    ranks.join(device.type)
    use_threads(spec.resources, processes=ranks.on_this_machine())
    bind_to_gpu(device)
    try:
        with open_components(run, spec, device) as components, RolloutSource(components) as source:
            ranks.bound_waits(spec.launcher.collective_timeout_seconds)
            return _run(components, source, inputs, stop, started)
    finally:
        ranks.leave()


def with_budget(spec: "Experiment", microbatch_tokens: int) -> "Experiment":
    """Returns the spec with this token budget per microbatch, unless that is 0. Batch and gradient stay the same."""
    if not microbatch_tokens:
        return spec
    training = spec.training.model_copy(update={"microbatch_tokens": microbatch_tokens})
    return spec.model_copy(update={"training": training})


def _run(
    components: "TrainerComponents",
    source: "RolloutSource",
    inputs: dict[str, Any],
    stop: StopAfterStep,
    started: float,
) -> int:
    """Trains, from the run's last checkpoint if there is one, and records how training ended. Returns the exit code."""
    from rpg.checkpoints.checkpoint import Checkpoints
    from rpg.checkpoints.retention import Retention
    from rpg.guards import GuardStoppedError
    from rpg.processes import ranks
    from rpg.recording.progress import ProgressFile
    from rpg.rewards.score import RewardAwayError, RewardFailedError
    from rpg.run_recorder.recorder import RunRecorder, open_writer
    from rpg.run_recorder.state import TrainingState
    from rpg.samplers.out_of_memory import SamplerOutOfMemoryError
    from rpg.samplers.sentinel import StaleEngineError
    from rpg.trainer import DivergedError, Trainer
    from specs.machine.fence import Fence

    run, first = components.run, ranks.rank() == 0
    fence = Fence(run.path, inputs.get("lease", 0))
    checkpoints = Checkpoints(run.checkpoints, Retention.of(components.spec.training.checkpoint), fence)
    state = TrainingState()
    resumed = checkpoints.latest()
    writer = open_writer(run, resumed, fence, components.spec)
    recorder = RunRecorder(components, source, checkpoints, writer, fence)
    recorder.recall_evaluations(resumed)
    begins = f"attempt {writer.attempt}, {ranks.world_size()} rank(s)"
    recorder.event(resumed, "resumed" if resumed else "started", begins)
    if inputs.get("failure"):
        recorder.event(resumed, "attempt_failed", inputs["failure"])
    progress = ProgressFile(run, fence, steps=components.spec.training.steps, speaks=first)
    if trial := components.learner.passes.packing_trial:
        progress.say(str(trial))
        if not trial.keeps_apart:
            recorder.event(resumed, "not_packed", str(trial))
    trainer = Trainer(components, source, state, recorder, progress)
    try:
        if resumed:
            state.load(components, source, checkpoints.path(resumed))
        else:
            components.check_sampler_weights()
        ready = f"ready in {time.monotonic() - started:.1f} s"
        progress.say(f"{'resumes after' if resumed else 'begins at'} step {resumed}; {ready}")
        done = trainer.train(stop)
    except (
        DivergedError,
        GuardStoppedError,
        StaleEngineError,
        SamplerOutOfMemoryError,
        RewardFailedError,
        RewardAwayError,
    ) as error:
        recorder.event(state.step, "guard_stopped" if isinstance(error, GuardStoppedError) else "failed", str(error))
        recorder.close()
        note_exit(run.path, EarlyExit(cause_of(error), str(error)))
        print(f"train: {error}", file=sys.stderr)
        return 1
    except SupersededError:
        raise
    except Exception as error:
        if absent := ranks.absent_ranks(error, run.path / "exits"):
            print(f"train: {absent}", file=sys.stderr)
        note_exit(run.path, EarlyExit(cause_of(error), absent or str(error), trainer.largest_pass))
        raise
    finally:
        checkpoints.close()
    if not done and trainer.paused:
        progress.say(f"paused at step {state.step}; its state is saved")
        return 0
    if not done:
        note_exit(run.path, EarlyExit("preempted" if stop.by_signal else "stopped"))
        progress.say(f"stopped after step {state.step}, as requested; its state is saved")
        return STOPPED
    recorder.finish(state, inputs["fingerprint"])
    return 0


if __name__ == "__main__":
    time_output()
    sys.exit(main(Path(sys.argv[1])))
