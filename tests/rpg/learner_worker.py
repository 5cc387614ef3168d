"""One rank of the learner's tests: `learner_worker INPUTS OUT CASE...` makes five updates on fixed responses.

A case is ZERO:PRECISION:MICROBATCH_TOKENS, or `plain`: the same updates written out in PyTorch, one response at a time.
The weights after the updates, and the mean gradient norm (to whose scale AdamW is blind), go to OUT/<case>.npz.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rpg import ranks
from rpg.advantages import advantages
from rpg.batch import StepRollouts
from rpg.ledger import TokenLedger
from rpg.objectives import token_losses
from rpg.parts import open_parts
from rpg.rewards.score import Score
from rpg.run_directory import RunDirectory
from rpg.run_state import RunState
from rpg.trainer import Minibatch, Trainer
from specs.schema.experiment import Experiment
from tests.rpg.tiny_run import make_run

UPDATES = 5
TRAINING = {
    **{"steps": 1, "prompts_per_step": 5, "group_size": 5, "minibatches": UPDATES, "schedule": {"type": "constant"}},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.05, "weight_decay": 0.1},
}
ROLLOUT = {"max_response_length": 20, "temperature": 1.3}


def responses() -> StepRollouts:
    """25 responses of 1 to 20 random tokens to five prompts of 1 to 5 tokens, with random rewards."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 21, 25)
    return StepRollouts(
        prompts=tuple(generator.integers(2, 5, length) for length in range(1, 6)),
        problems=(0,) * 5,
        group_ids=np.repeat(np.arange(5), 5),
        token_ids=generator.integers(0, 5, lengths.sum()),
        rollout_logprobs=np.zeros(lengths.sum(), dtype=np.float32),
        lengths=lengths,
        finish_reasons=("stop",) * 25,
        responses=("",) * 25,
        scores=tuple(Score(value=float(value), correct=False) for value in generator.normal(size=25)),
        policy_version=0,
    )


def advantage_of(step: StepRollouts) -> torch.Tensor:
    return advantages(
        torch.from_numpy(step.rewards), torch.from_numpy(step.group_ids), baseline="group_mean", scale="none"
    )


def by_trainer(run: RunDirectory, spec: Experiment) -> dict[str, np.ndarray]:
    """The updates as the trainer makes them."""
    step = responses()
    with open_parts(run, spec, torch.device("cpu")) as parts:
        trainer = Trainer(parts, RunState(), keeper=None, progress=None)
        minibatches, ledger = trainer.cut(step), TokenLedger(len(step.token_ids))
        trainer.recompute(minibatches, ledger)
        seen, _ = trainer.update(minibatches, trainer.advantages(step, ledger), ledger)
        weights = {name: weight.float().numpy().copy() for name, weight in parts.learner.weights()}
        check_reference(trainer, minibatches, ledger)
        return weights | {"grad_norm": np.array([seen.reduce()["grad_norm"]])}


@torch.no_grad()
def check_reference(trainer: Trainer, minibatches: list[Minibatch], ledger: TokenLedger) -> None:
    """The snapshot from before the updates still gives the old logprobs; the policy does not, before nor after."""
    batch, learner, reference = minibatches[1].passes[0], trainer.parts.learner, trainer.parts.reference
    assert reference is not None
    tolerance = 1e-5 if trainer.training.precision == "float32" else 1e-2

    def logprobs() -> torch.Tensor:
        return learner.logprobs(batch)[0]

    old, before = ledger.read("old_logprobs", batch), logprobs()
    with reference.in_place():
        lent = logprobs()
    after = logprobs()
    assert torch.equal(before, after)
    if batch.counts:
        assert (lent - old).abs().max() < tolerance
        assert (before - old).abs().max() > 3 * tolerance
    reference.move()
    with reference.in_place():
        assert torch.equal(logprobs(), before)


def by_hand(base: Path, spec: Experiment) -> dict[str, np.ndarray]:
    """The same updates with whole logits, no padding, one response at a time."""
    step, training = responses(), spec.training
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.optimizer.learning_rate, eps=1e-8, weight_decay=training.optimizer.weight_decay
    )

    def logprobs(index: int) -> torch.Tensor:
        prompt = torch.from_numpy(step.prompts[step.group_ids[index]])
        response = torch.from_numpy(step.token_ids[step.starts[index] : step.starts[index + 1]])
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits / spec.rollout.temperature, -1).gather(1, response[:, None])[:, 0]

    with torch.no_grad():
        old = [logprobs(index) for index in range(25)]
    norms = []
    for part in np.array_split(np.arange(25), UPDATES):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index in part:
            now = logprobs(index)
            losses = token_losses(
                spec.objective,
                logprobs=now[None],
                old_logprobs=old[index][None],
                ref_logprobs=old[index][None],
                advantages=advantage_of(step)[index].expand(1, len(now)),
                response_mask=torch.ones(1, len(now)),
            )
            total = total + losses.sum() / step.lengths[part].sum()
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), training.optimizer.max_grad_norm).item())
        optimizer.step()
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return weights | {"grad_norm": np.array([np.mean(norms)])}


def main(inputs: Path, out: Path, cases: list[str]) -> None:
    ranks.join("cpu")
    torch.set_num_threads(1)
    for case in cases:
        zero, precision, tokens = ("0:float32:1" if case == "plain" else case).split(":")
        changes = {"zero_stage": int(zero), "precision": precision, "microbatch_tokens": int(tokens)}
        place = out / f"{case}-rank{ranks.rank()}of{ranks.world_size()}"
        run = RunDirectory(make_run(inputs, place, training=TRAINING | changes, rollout=ROLLOUT))
        weights = by_hand(inputs / "base", run.spec()) if case == "plain" else by_trainer(run, run.spec())
        if ranks.rank() == 0:
            np.savez(out / f"{case}x{ranks.world_size()}.npz", **weights)
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
