"""Ranks that share a step: `shares_worker OUT RANKS` leaves, in OUT, what each of them held and computed.

Of the learner's 25 responses each rank samples those to its prompts. The processes are forks of one, which has imported
torch once.
"""

import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpg.batches.batch import StepRollouts, join, select
from rpg.batches.ledger import TokenLedger
from rpg.batches.minibatches import cut, plan_step
from rpg.batches.shares import hand_over, without_contents
from rpg.batches.step_loss import step_advantages
from rpg.checkpoints.pieces import StateCopy
from rpg.processes import ranks
from rpg.recording.rows import write_rollouts, write_tokens
from rpg.recording.segments import SegmentWriter
from rpg.rollouts.ahead import WAITING, QueuedBatch, load_waiting, plain_waiting
from rpg.types import Problem
from specs.machine.launch import KEY
from specs.schema.experiment import Experiment
from specs.schema.training import Training
from tests.rpg.learner_worker import responses
from tests.rpg.tiny_run import SPEC

RUN = "shared"
PROBLEMS = [Problem(f"p{number}", f"prompt {number}", "", "train") for number in range(5)]
TRAINING = Training(steps=1, prompts_per_step=5, group_size=5, minibatches=2, microbatch_tokens=60)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {"objective": {"type": "grpo", "kl_coef": 0.0}, "reference": {"source": "initial", "update": None}},
    "whitened": {"objective": {"type": "reinforce_plus_plus"}, "reference": {"source": "initial", "update": None}},
    "penalized": {
        "objective": {"type": "grpo", "kl_coef": 0.3, "kl_in": "reward"},
        "reference": {"source": "initial", "update": None},
    },
}


def the_step() -> StepRollouts:
    """The learner's step, each response with a text of its own."""
    step = responses()
    return replace(
        step,
        problems=tuple(range(5)),
        rollout_logprobs=known_of(step, 0),
        responses=tuple(f"response {number}, größer" for number in range(25)),
    )


def known_of(step: StepRollouts, column: int) -> np.ndarray:
    """Known value of each sampled token: it follows from the token's place in the whole step."""
    places = np.concatenate([1000 * response + np.arange(step.num_sampled[response]) for response in step.held])
    values: np.ndarray = np.sin(places + column).astype(np.float32) - 1
    return values


def experiment_of(name: str) -> Experiment:
    return Experiment.model_validate(SPEC | OBJECTIVES[name])


def sampled_here(whole: StepRollouts) -> StepRollouts:
    """This rank's share, then the step as every rank knows it."""
    share = np.array_split(np.arange(5), ranks.world_size())[ranks.rank()]
    shares = ranks.gather_made(lambda: select(whole, share.tolist()), what="test", for_others=without_contents)
    return replace(join(shares), prompts=whole.prompts)


def trained_here(step: StepRollouts, *, packed: bool = False) -> tuple[StepRollouts, TokenLedger]:
    """The step with what this rank trains on, and a ledger in which the passes have filled in every column."""
    signal = np.arange(25) % 4 > 0  # a quarter of the responses is left where it was sampled
    plan = plan_step(step, TRAINING, packed=packed, signal=signal)
    step = hand_over(step, plan.trainers(25))
    ledger = TokenLedger(len(step.rollout_logprobs))
    for minibatch in cut(step, plan, torch.device("cpu")):
        for batch in minibatch.passes:
            columns = {name: torch.from_numpy(known_of(step, at)) for at, name in enumerate(TokenLedger.COLUMNS)}
            ledger.write(batch, **{name: batch.look_up(values) for name, values in columns.items()})
    return step, ledger


def advantages_here(step: StepRollouts) -> dict[str, np.ndarray]:
    old, ref = (torch.from_numpy(known_of(step, column)) for column in (1, 2))
    return {
        name: step_advantages(experiment_of(name), step, old_logprobs=old, ref_logprobs=ref).numpy()
        for name in OBJECTIVES
    }


def record(step: StepRollouts, ledger: TokenLedger, directory: Path) -> None:
    """The rows of the responses that this rank holds, as segments."""
    writer = SegmentWriter(directory, RUN, 1, rank=ranks.rank(), ranks=ranks.world_size())
    advantages = torch.from_numpy(step.rewards[step.held])
    write_rollouts(writer, 1, step, PROBLEMS, advantages, trained_version=0, reference_version=0)
    write_tokens(writer, 1, step, ledger.columns, np.arange(25) % 5 > 0)
    writer.flush()


def rank_of(number: int, size: int, out: Path) -> None:
    """The work of one rank."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size), KEY: "shares"}
    ranks.join_in(torch.distributed.FileStore(str(out / "store"), size), "cpu")
    step = sampled_here(the_step())
    copy = StateCopy()
    copy.values(WAITING, plain_waiting([QueuedBatch(2, step, position=9)]))
    copy.write(out / "checkpoint")
    for packed in (True, False):
        trained, ledger = trained_here(step, packed=packed)
    record(trained, ledger, out / "runs" / RUN)
    (loaded,) = load_waiting(out / "of_one_rank")
    given = {f"loaded/{name}": getattr(loaded.rollouts, name) for name in ("held", "token_ids", "rollout_logprobs")}
    mine = {"sampled": step.held, "trained": trained.held, "tokens": np.array(trained.token_ids.shape)}
    np.savez(out / f"rank{number}.npz", **mine, **given, **advantages_here(trained))
    ranks.wait_for_all()
    ranks.leave()


def main(out: Path, size: int) -> None:
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=rank_of, args=(number, size, out)) for number in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    sys.exit(any(process.exitcode != 0 for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
