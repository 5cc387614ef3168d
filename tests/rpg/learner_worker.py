"""One rank of the learner's tests: `learner_worker INPUTS OUT CASE...` makes five updates on fixed responses.

A case is ZERO:PRECISION:MICROBATCH_TOKENS and names of OPTIONS, or `plain` and such names: the same updates written out
in PyTorch, in float32 and one response at a time. The weights after the updates, the mean gradient norm (to whose scale
AdamW is blind), and of a mixture of experts its balancing loss go to OUT/<case>.npz.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from schedulefree import AdamWScheduleFree
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rpg.advantages import advantages
from rpg.batches.batch import StepRollouts
from rpg.batches.ledger import TokenLedger
from rpg.batches.minibatches import Minibatch, cut, plan_step
from rpg.checkpoints.pieces import StateCopy
from rpg.components import _seed_everything, open_components
from rpg.learner import shards
from rpg.learner.deepspeed import Learner
from rpg.learner.policy import load_model
from rpg.objectives import token_losses
from rpg.processes import ranks
from rpg.recording.run_directory import RunDirectory
from rpg.rewards.score import Score
from rpg.rollouts.source import RolloutSource
from rpg.run_recorder.state import TrainingState
from rpg.trainer import Trainer
from specs.schema.experiment import Experiment
from specs.schema.training import Training
from tests.rpg.tiny_run import make_run

UPDATES = 5
TRAINING: dict[str, Any] = {
    **{"steps": 1, "prompts_per_step": 5, "group_size": 5, "minibatches": UPDATES, "schedule": {"type": "constant"}},
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.05, "weight_decay": 0.1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "shared": {"sequence_parallel_size": 2, "ranks": 2},
    "recomputed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "offloaded": {"offload": {"optimizer": True}},
    "all_offloaded": {"offload": {"optimizer": True, "parameters": True}},
    "away": {"offload": {"while_sampling": True}},
    "free": {
        "optimizer": {"type": "schedule_free_adamw"},
        "schedule": {"type": "constant", "warmup_updates": 3},
    },
    "lora": {
        "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "optimizer": {"learning_rate": 5e-3},
    },
    "exact_sum": {"gradient_reduction": "float32"},
    "poisoned": {"on_not_finite": "skip"},
}
POISONED = 2
"""The update of a poisoned case, from 0, for which the last rank has no finite gradient."""
ROLLOUT = {"max_response_length": 20, "temperature": 1.3}


def responses() -> StepRollouts:
    """25 responses of 1 to 20 random tokens to five prompts of 1 to 5 tokens, with random rewards.

    Groups are of unequal size, so that updates of five responses cut some in two and hold several of others. Three in
    ten tokens are given, anywhere, but not all of a response.
    """
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 21, 25)
    sampled = generator.random(lengths.sum()) < 0.7
    sampled[lengths.cumsum() - lengths + generator.integers(0, lengths)] = True
    return StepRollouts(
        prompts=tuple(generator.integers(2, 5, length) for length in range(1, 6)),
        problems=(0,) * 5,
        group_ids=np.repeat(np.arange(5), [7, 3, 9, 1, 5]),
        token_ids=generator.integers(0, 5, lengths.sum()),
        sampled=sampled,
        rollout_logprobs=np.zeros(sampled.sum(), dtype=np.float32),
        lengths=lengths,
        num_sampled=np.add.reduceat(sampled, lengths.cumsum() - lengths, dtype=np.int64),
        held=np.arange(25),
        finish_reasons=("stop",) * 25,
        responses=("",) * 25,
        scores=tuple(Score(value=float(value), correct=False) for value in generator.normal(size=25)),
        policy_version=0,
    )


def advantage_of(step: StepRollouts) -> torch.Tensor:
    return advantages(
        torch.from_numpy(step.rewards), torch.from_numpy(step.group_ids), baseline="group_mean", scale="none"
    )


def share_of_parameters(module: torch.nn.Module) -> float:
    """What this rank holds of a module's elements, whole or as shards."""
    parameters: list[Any] = list(module.parameters())
    held = sum(p.numel() + (p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0) for p in parameters)
    whole = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in parameters)
    return float(held / whole)


@contextmanager
def noting_the_share_given_to_deepspeed(path: Path) -> Iterator[None]:
    """Writes what this rank holds of the policy when `deepspeed.initialize` is called."""
    import deepspeed

    initialize = deepspeed.initialize

    def noting(*, model: torch.nn.Module, **rest: Any) -> Any:
        path.write_text(str(share_of_parameters(model)))
        return initialize(model=model, **rest)

    deepspeed.initialize = noting
    try:
        yield
    finally:
        deepspeed.initialize = initialize


def by_trainer(run: RunDirectory, spec: Experiment) -> dict[str, np.ndarray]:
    """The updates as the trainer makes them."""
    step = responses()
    with (
        noting_the_share_given_to_deepspeed(run.path / "share"),
        open_components(run, spec, torch.device("cpu")) as components,
    ):
        trainer = Trainer(components, RolloutSource(components), TrainingState(), Unrecorded(), Unrecorded())  # type: ignore[arg-type]
        plan = plan_step(step, trainer.training, packed=components.learner.packs)
        minibatches = cut(step, plan, torch.device("cpu"))
        assert components.learner.packs == trainer.training.packing
        ledger = TokenLedger(len(step.rollout_logprobs))
        minibatches = trainer.recompute(minibatches, ledger)
        if trainer.training.on_not_finite == "skip":
            poison(trainer)
        if trainer.training.offload.leaves_while_sampling:
            rest_between_updates(components.learner)
        with components.learner.updating():
            seen, _ = trainer.update(minibatches, trainer.advantages(step, ledger), ledger)
        weights = {name: weight.float().numpy().copy() for name, weight in components.learner.weights()}
        check_reference(trainer, minibatches, ledger)
        assert seen.num_skipped == (trainer.training.on_not_finite == "skip")
        metrics = seen.reduce()
        kept = [name for name in ("grad_norm", "aux_loss") if name in metrics]
        return weights | {name: np.array([metrics[name]]) for name in kept}


def poison(trainer: Trainer) -> None:
    """Has one update meet losses that are no number, on one rank; proves that it leaves all state as it was."""
    learner, make = trainer.components.learner, trainer.components.learner.update
    backward = learner.backward
    last = ranks.rank() == ranks.world_size() - 1

    def poisoned_backward(loss: torch.Tensor) -> None:
        backward(loss * float("nan") if last and trainer.state.updates == POISONED else loss)

    def state(learning_rate: float) -> bytes:
        for group in learner._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        copied = StateCopy()
        learner.save(copied)
        return b"".join(part for components in copied._files.values() for part in components)

    def proven_update(*, learning_rate: float) -> float:
        before = state(learning_rate)
        norm = make(learning_rate=learning_rate)
        assert (before == state(learning_rate)) == (trainer.state.updates == POISONED) == (not np.isfinite(norm))
        return norm

    learner.backward, learner.update = poisoned_backward, proven_update  # type: ignore[method-assign]


def rest_between_updates(learner: Learner) -> None:
    """Has the state of an update leave the device after each one, as it does while a step's rollouts are sampled."""
    make = learner.update

    def update_and_rest(*, learning_rate: float) -> float:
        norm = make(learning_rate=learning_rate)
        model, state = places(learner, of_model=True), places(learner, of_model=False)
        learner._update_state.to_host()
        assert places(learner, of_model=True) == model, "the model's weights stay"
        assert places(learner, of_model=False) != state, "on a CPU it is copied"
        learner._update_state.to_device()
        return norm

    learner.update = update_and_rest  # type: ignore[method-assign]


def places(learner: Learner, *, of_model: bool) -> set[int]:
    """Returns the memory addresses of the model's weights, or of the optimizer's further state, including master
    weights."""
    parameters: list[Any] = list(learner.model.parameters())
    weights = {getattr(parameter, "ds_tensor", parameter).data_ptr() for parameter in parameters}
    stepped = list(shards._stepped(learner._engine, learner.model))
    kept = {tensor.data_ptr() for part in stepped for tensor in (part.values, *part.tensors().values())}
    return weights if of_model else kept - weights


class Unrecorded:
    """For a trainer that has no run's records to write."""

    def event(self, *_: Any) -> None:
        pass

    def say(self, _: str) -> None:
        pass


@torch.no_grad()
def check_reference(trainer: Trainer, minibatches: list[Minibatch], ledger: TokenLedger) -> None:
    """The snapshot from before the updates still gives the old logprobs; the policy does not, before nor after."""
    batch, learner, reference = minibatches[1].passes[0], trainer.components.learner, trainer.components.reference
    tolerance = 1e-5 if trainer.training.precision == "float32" else 5e-3

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
    """Makes the same updates with whole logits, no padding, one response at a time."""
    step, training = responses(), spec.training
    starts = np.concatenate([[0], np.cumsum(step.lengths)])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trained = low_rank(model, base, training) if training.lora else list(model.parameters())
    optimizer = optimizer_of(training, trained)

    routed: dict[int, torch.Tensor] = {}

    def routers(index: int, outputs: Any) -> torch.Tensor:
        """Router logits of the tokens that predict the sampled ones. [layers, sampled tokens, experts]"""
        place, before = slice(starts[index], starts[index + 1]), len(step.prompts[step.group_ids[index]])
        return torch.stack(outputs.router_logits)[:, before - 1 : -1][:, torch.from_numpy(step.sampled[place])]

    def logprobs(index: int) -> torch.Tensor:
        prompt = torch.from_numpy(step.prompts[step.group_ids[index]])
        place = slice(starts[index], starts[index + 1])
        response, sampled = torch.from_numpy(step.token_ids[place]), torch.from_numpy(step.sampled[place])
        outputs = model(input_ids=torch.cat([prompt, response])[None])
        logits = outputs.logits[0, len(prompt) - 1 : -1]
        if model.config.model_type == "qwen3_moe":
            routed[index] = routers(index, outputs)
        return torch.log_softmax(logits / spec.rollout.temperature, -1).gather(1, response[:, None])[sampled, 0]

    with torch.no_grad():
        old = [logprobs(index) for index in range(25)]
    before = dict(routed)
    if isinstance(optimizer, AdamWScheduleFree):
        optimizer.train()
    norms, balances = [], list[float]()
    for number, part in enumerate(np.array_split(np.arange(25), UPDATES)):
        if training.on_not_finite == "skip" and number == POISONED:
            continue
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
            total = total + losses.sum() / step.num_sampled[part].sum()
        if routed:
            rows = [torch.cat([each[index] for index in part], 1) for each in (before, routed)]
            balance = balance_by_hand(*rows)
            total = total + model.config.router_aux_loss_coef * balance
            own = model.config.num_experts, model.config.num_experts_per_tok
            balances.append(load_balancing_loss_func(tuple(rows[1].detach()), *own).item())
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, training.optimizer.max_grad_norm).item())
        optimizer.step()
    if isinstance(optimizer, AdamWScheduleFree):
        optimizer.eval()
    for name in [name for name, module in model.named_modules() if parametrize.is_parametrized(module)]:
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    of_experts = {"aux_loss": np.array([np.mean(balances)])} if balances else {}
    return weights | {"grad_norm": np.array([np.mean(norms)])} | of_experts


def balance_by_hand(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Experts times the sum of f_e P_e of the two best of four experts; f_e by the logits before the step's updates.
    [layers, tokens, experts] each"""
    best = before.argsort(dim=-1)[..., -2:].flatten()
    probability = torch.softmax(now, -1).flatten(0, 1).mean(0)
    share = torch.stack([(best == expert).sum() / (len(best) / 2) for expert in range(4)])
    return 4 * (share * probability).sum()


def optimizer_of(training: Training, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = training.optimizer.learning_rate, training.optimizer.weight_decay
    if training.optimizer.type == "adamw":
        return torch.optim.AdamW(trained, lr=rate, eps=1e-8, weight_decay=decay)
    warmup = training.schedule.warmup_updates
    return AdamWScheduleFree(trained, lr=rate, eps=1e-8, weight_decay=decay, warmup_steps=warmup)


class LowRank(torch.nn.Module):
    """W -> W + scale B A, with B = 0 at first."""

    def __init__(self, a: torch.Tensor, rows: int, scale: float) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.detach().clone()), torch.nn.Parameter(a.new_zeros(rows, len(a)))
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


def low_rank(model: PreTrainedModel, base: Path, training: Training) -> list[torch.nn.Parameter]:
    """Freezes the model and gives it the learner's adapters, written out; returns what is trained."""
    _seed_everything(0)
    drawn = {name: a for name, a in load_model(base, training).named_parameters() if "lora_A" in name}
    model.requires_grad_(False)
    trained: list[torch.nn.Parameter] = []
    for name, a in drawn.items():
        linear = model.get_submodule(name.partition(".lora_A")[0])
        adapter = LowRank(a, linear.weight.shape[0], training.lora.alpha / training.lora.rank)
        parametrize.register_parametrization(linear, "weight", adapter)
        trained += [adapter.a, adapter.b]
    return trained


def main(inputs: Path, out: Path, cases: list[str]) -> None:
    ranks.join("cpu")
    torch.set_num_threads(1)
    for case in cases:
        plain = case.startswith("plain")
        zero, precision, tokens, *options = case.replace("plain", "0:float32:1").split(":")
        changes: dict[str, Any] = {"zero_stage": int(zero), "precision": precision, "microbatch_tokens": int(tokens)}
        for option in options:
            optimizer = changes.get("optimizer", {})
            changes |= OPTIONS[option]
            changes["optimizer"] = TRAINING["optimizer"] | optimizer | OPTIONS[option].get("optimizer", {})
        place = out / f"{case}-rank{ranks.rank()}of{ranks.world_size()}"
        run = RunDirectory(make_run(inputs, place, training=TRAINING | changes, rollout=ROLLOUT))
        weights = by_hand(inputs / "base", run.spec()) if plain else by_trainer(run, run.spec())
        if ranks.rank() == 0:
            np.savez(out / f"{case}x{ranks.world_size()}.npz", **weights)
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
