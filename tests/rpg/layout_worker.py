"""One rank of the test of layouts: `layout_worker INPUTS OUT LEG CASE...` trains a part of a way; others continue it.

A way is three legs over parts of the same responses, the reference moving in between. A case is PRECISION:Z-Z-Z, the
ZeRO stage of each leg; PRECISION+lora and PRECISION+schedule_free are trained so. Leg 1 begins, and goes the whole way
for comparison as well; legs 2 and 3 go on from what the leg before saved to OUT/<case>/leg<n>. The end of each way is
saved like a leg.
"""

import sys
from pathlib import Path

import torch

from rpg.batches.ledger import TokenLedger
from rpg.batches.minibatches import cut, plan_step
from rpg.components import TrainerComponents, open_components
from rpg.processes import ranks
from rpg.recording.run_directory import RunDirectory
from rpg.rollouts.source import RolloutSource
from rpg.run_recorder.state import TrainingState
from rpg.trainer import Trainer
from tests.rpg.learner_worker import ROLLOUT, TRAINING, responses
from tests.rpg.tiny_run import make_run

PARTS = {1: slice(0, 2), 2: slice(2, 4), 3: slice(4, 5)}


def go(components: TrainerComponents, state: TrainingState, leg: int) -> None:
    """Trains on a leg's minibatches, and moves the reference."""
    step = responses()
    trainer = Trainer(components, RolloutSource(components), state, recorder=None, progress=None)
    minibatches = cut(step, plan_step(step, components.spec.training), components.device)[PARTS[leg]]
    ledger = TokenLedger(len(step.rollout_logprobs))
    trainer.recompute(minibatches, ledger)
    with components.learner.updating():
        trainer.update(minibatches, trainer.advantages(step, ledger), ledger)
    components.reference.move(ema_decay=0.5)
    state.step += 1


def save(components: TrainerComponents, state: TrainingState, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    ranks.wait_for_all()
    state.copy(components, RolloutSource(components)).write(directory)
    ranks.wait_for_all()


def main(inputs: Path, out: Path, leg: int, cases: list[str]) -> None:
    ranks.join("cpu")
    torch.set_num_threads(1)
    for case in cases:
        how, stages = case.split(":")
        precision, *more = how.split("+")
        changes = {"precision": precision, "zero_stage": int(stages.split("-")[leg - 1]), "microbatch_tokens": 60}
        if "lora" in more:
            changes["lora"] = {"rank": 2}
        if "schedule_free" in more:
            changes["optimizer"] = TRAINING["optimizer"] | {"type": "schedule_free_adamw"}
        place = out / case / f"run{leg}-{ranks.rank()}of{ranks.world_size()}"
        run = RunDirectory(make_run(inputs, place, training=TRAINING | changes, rollout=ROLLOUT))
        with open_components(run, run.spec(), torch.device("cpu")) as components:
            state = TrainingState()
            if leg > 1:
                state.load(components, RolloutSource(components), out / case / f"leg{leg - 1}")
            go(components, state, leg)
            save(components, state, out / case / f"leg{leg}")
            if leg == 1:
                go(components, state, 2)
                go(components, state, 3)
                save(components, state, out / case / "straight")
                # Back in the middle of a run: what came since is undone.
                state.load(components, RolloutSource(components), out / case / "leg1")
                go(components, state, 2)
                go(components, state, 3)
                save(components, state, out / case / "again")
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
