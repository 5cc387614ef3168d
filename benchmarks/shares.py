"""Peak memory of a rank over a step's tokens, by the number of ranks; the model and its passes' activations aside.

Each rank samples its prompts' responses, as arrays; they are handed over to the ranks that train on them, cut into
passes, put into the ledger column by column, and written. The sampler and the model are left out.

`python benchmarks/shares.py [--ranks 1 2 4] [--responses 512] [--length 4096]` prints, of each number of ranks, the
largest rank's peak over its memory before, MiB, and bytes a token of the whole step.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import torch

from rpg.batches.batch import StepRollouts, join
from rpg.batches.ledger import TokenLedger
from rpg.batches.minibatches import cut, plan_step
from rpg.batches.shares import hand_over, without_contents
from rpg.processes import ranks
from rpg.recording.rows import write_rollouts, write_tokens
from rpg.recording.segments import SegmentWriter
from rpg.rewards.score import Score
from rpg.types import Problem
from specs.machine.launch import KEY
from specs.schema.training import Training

GROUP_SIZE, PROMPT, VOCABULARY = 8, 200, 151_936


def sampled(groups: int, longest: int, seed: int) -> StepRollouts:
    """Responses to `groups` prompts, of random tokens and of lengths from a sixteenth of the longest on."""
    generator = np.random.default_rng(seed)
    count = groups * GROUP_SIZE
    lengths = generator.integers(longest // 16, longest + 1, count)
    tokens = int(lengths.sum())
    return StepRollouts(
        prompts=tuple(np.zeros(PROMPT, dtype=np.int64) for _ in range(groups)),
        problems=(0,) * groups,
        group_ids=np.repeat(np.arange(groups), GROUP_SIZE),
        lengths=lengths,
        num_sampled=lengths,
        finish_reasons=("stop",) * count,
        scores=tuple(Score(value=float(value), correct=False) for value in generator.normal(size=count)),
        held=np.arange(count),
        token_ids=generator.integers(0, VOCABULARY, tokens),
        sampled=np.ones(tokens, dtype=np.bool_),
        rollout_logprobs=generator.normal(size=tokens).astype(np.float32),
        responses=tuple("word " * length for length in lengths),
        policy_version=0,
    )


def one_step(groups: int, longest: int, directory: Path) -> int:
    """A step's way over this rank. Returns the tokens of all ranks."""
    mine = np.array_split(np.arange(groups), ranks.world_size())[ranks.rank()]
    shares = ranks.gather_made(
        lambda: sampled(len(mine), longest, seed=int(mine[0])), what="rollouts", for_others=without_contents
    )
    step = replace(join(shares), prompts=tuple(np.zeros(PROMPT, dtype=np.int64) for _ in range(groups)))
    del shares
    training = Training(
        steps=1, prompts_per_step=groups, group_size=GROUP_SIZE, minibatches=4, microbatch_tokens=4 * longest
    )
    plan = plan_step(step, training, packed=True)
    step = hand_over(step, plan.trainers(len(step.lengths)))
    ledger = TokenLedger(len(step.rollout_logprobs))
    for minibatch in cut(step, plan, torch.device("cpu")):
        for batch in minibatch.passes:
            ledger.write(batch, **dict.fromkeys(TokenLedger.COLUMNS, batch.rollout_logprobs))
    writer = SegmentWriter(directory, "run", 1, rank=ranks.rank(), ranks=ranks.world_size())
    problems, advantages = [Problem("p", "", "", "train")], torch.zeros(len(step.held))
    write_rollouts(writer, 1, step, problems, advantages, trained_version=0, reference_version=0)
    write_tokens(writer, 1, step, ledger.columns, np.ones(len(step.lengths), dtype=np.bool_))
    writer.flush()
    return int(step.num_sampled.sum())


def one_rank(
    rank: int, size: int, groups: int, longest: int, directory: Path, peaks: "SimpleQueue[tuple[float, int]]"
) -> None:
    """Puts the MiB by which this rank's memory grew, and the step's tokens."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), KEY: "shares"}
    ranks.join_in(torch.distributed.FileStore(str(directory / "store"), size), "cpu")
    ranks.wait_for_all()
    before = peak_mib()
    tokens = one_step(groups, longest, directory)
    peaks.put((peak_mib() - before, tokens))
    ranks.wait_for_all()
    ranks.leave()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096, help="of the longest response")
    arguments = parser.parse_args()
    forks = multiprocessing.get_context("fork")
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as directory:
            peaks = forks.SimpleQueue()
            work = (size, arguments.responses // GROUP_SIZE, arguments.length, Path(directory), peaks)
            processes = [forks.Process(target=one_rank, args=(rank, *work)) for rank in range(size)]
            for process in processes:
                process.start()
            grown, tokens = zip(*(peaks.get() for _ in processes), strict=True)
            for process in processes:
                process.join()
        most = max(grown)
        print(f"{size} rank(s), {tokens[0]:,} tokens: {most:.0f} MiB, {most * 2**20 / tokens[0]:.0f} bytes a token")


if __name__ == "__main__":
    main()
