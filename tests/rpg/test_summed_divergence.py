"""Training with a divergence that is summed over tokens, reproduced from the record and the weights by plain torch."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PACKAGES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rpg.test_teacher import make_teacher
from tests.rpg.tiny_run import make_inputs, make_run, rows, train

KL_COEF, STEP = 0.7, 3
TRAINING = {
    **{"steps": STEP, "minibatches": 1, "export_every_steps": 1, "schedule": {"type": "constant"}},
    **{"optimizer": {"learning_rate": 0.02, "epsilon": 1e-6}, "checkpoint": {"every_steps": 100}},
}
TAUGHT: dict[str, Any] = {"source": "teacher", "reward": {"type": "none"}}
"""Without a reward, of a teacher of another architecture with more logits than the policy."""
CASES: dict[str, dict[str, Any]] = {
    "full-token": {"objective": {"kl": "full", "divergence": "reverse"}},
    "full-to-go": {"objective": {"kl": "full", "divergence": "jensen_shannon", "level": "to_go"}},
    "full-forward-to-go": {"objective": {"kl": "full", "divergence": "forward", "level": "to_go"}},
    "top-token": {"objective": {"kl": "top_k", "divergence": "unnormalized_forward", "kl_top_k": 2}},
    "top-to-go": {
        "objective": {"kl": "top_k", "divergence": "unnormalized_reverse", "level": "to_go", "kl_top_k": 2},
        "training": {"packing": False},
    },
    "adapters": {
        "objective": {"kl": "full", "divergence": "unnormalized_reverse", "estimator": "differentiable"},
        "training": {"lora": {"rank": 4, "alpha": 8.0}},
    },
    "shards": {
        "objective": {"kl": "full", "divergence": "unnormalized_forward"},
        "training": {"zero_stage": 3, "ranks": 2},
    },
    "turns": {
        "objective": {"kl": "full", "divergence": "reverse", "level": "to_go"},
        "rollout": {"rollouter": {"type": "check_again", "question": "0="}, "max_response_length": 12},
    },
    "agent": {
        "objective": {"kl": "top_k", "divergence": "jensen_shannon", "level": "to_go", "kl_top_k": 2},
        "rollout": {
            "rollouter": {
                **{"type": "agent", "program": "second_thoughts", "max_turns": 3, "turn_tokens": 5},
                "template": "{% for message in messages %}{{ message.content }}{% endfor %}",
            },
            "max_response_length": 20,
        },
    },
    "teacher": {"objective": {"kl": "full", "divergence": "unnormalized_forward"}, **TAUGHT},
    "teacher-jensen-shannon": {"objective": {"kl": "full", "divergence": "jensen_shannon", "level": "to_go"}, **TAUGHT},
    "teacher-top": {"objective": {"kl": "top_k", "divergence": "reverse", "kl_top_k": 4}, **TAUGHT},
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """The package with the environment of two turns is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGES))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH")))))
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    make_teacher(directory)
    return directory


@dataclass(frozen=True)
class Recorded:
    """A response of the record: the sampled tokens of each turn, behind their context, and its advantage."""

    turns: list[tuple[list[int], list[int]]]
    advantage: float


def responses(inputs: Path, run_dir: Path, step: int) -> list[Recorded]:
    """The responses of a step. An agent's turn may have a context of its own instead of everything before it."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    tokens = of_responses(run_dir, "tokens", step, "position")
    turns = of_responses(run_dir, "turns", step, "turn")
    read = []
    for rollout in [row for row in rows(run_dir, "rollouts") if row["step"] == step]:
        number, context, found = rollout["rollout_id"], tokenizer(rollout["prompt"])["input_ids"], []
        left = iter(row["token_id"] for row in tokens[number])
        one = {"num_tokens": len(tokens[number]), "sampled": True, "restart": False}
        for turn in turns.get(number, [one]):
            mine = list(islice(left, turn["num_tokens"]))
            context = [] if turn["restart"] else context
            found += [(context, mine)] if turn["sampled"] else []
            context = context + mine
        read.append(Recorded(found, rollout["advantage"]))
    return read


def of_responses(run_dir: Path, table: str, step: int, place: str) -> dict[int, list[dict[str, Any]]]:
    """Rows of a step by their response, in order."""
    found = sorted((row for row in rows(run_dir, table) if row["step"] == step), key=itemgetter("rollout_id", place))
    return {number: list(each) for number, each in groupby(found, itemgetter("rollout_id"))}


def states(objective: dict[str, Any], policy: Tensor, reference: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """D at each state over the summed tokens, and the addition of a sampled token that is outside of them, from log π
    and log π_ref [n, vocabulary]; on policy w is 1, and q = 1/r."""
    log_ratio, p, q = policy - reference, policy.exp(), reference.exp()
    mean = (p + q) / 2
    each = {
        "reverse": p * log_ratio,
        "forward": -q * log_ratio,
        "unnormalized_reverse": p * log_ratio - p + q,
        "unnormalized_forward": p - q - q * log_ratio,
        "jensen_shannon": (p * (policy - mean.log()) + q * (reference - mean.log())) / 2,
    }[objective["divergence"]]
    if objective["kl"] == "full":
        return each.sum(-1), torch.zeros(len(tokens))
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, reference.topk(objective["kl_top_k"]).indices, True)
    own = tokens[:, None]
    # A sampled token of probability π counts 1/π times.
    outside = torch.where(kept.gather(-1, own), 0.0, each.gather(-1, own) / p.detach().gather(-1, own))[:, 0]
    return torch.where(kept, each, 0.0).sum(-1), outside


def response_loss(objective: dict[str, Any], policy: Any, reference: Any, response: Recorded) -> tuple[Tensor, Tensor]:
    """Sum of the losses of a response's tokens, whose gradient is that of training; and the exact reverse KLs."""
    logits: dict[Any, list[Tensor]] = {policy: [], reference: []}
    for context, ids in response.turns:
        for model, found in logits.items():
            with torch.set_grad_enabled(model is policy):
                found.append(model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1])
    now, other = (torch.log_softmax(torch.cat(found), -1) for found in logits.values())
    other = other[:, : now.shape[-1]]  # the teacher has further tokens, so that its mass here is below 1
    tokens = torch.tensor([token for _, ids in response.turns for token in ids])
    chosen, log_q = (each.gather(-1, tokens[:, None])[:, 0] for each in (now, other))
    log_q = log_q - chosen.detach()
    value, outside = states(objective, now, other, tokens)
    reached, later = torch.ones(len(tokens)), torch.zeros(len(tokens))
    if objective.get("level") == "to_go" and "forward" in objective["divergence"]:
        reached = (log_q.cumsum(0) - log_q).exp()
    elif objective.get("level") == "to_go":
        whole = (value + outside).detach()
        later = whole.flip(0).cumsum(0).flip(0) - whole
    losses = -(response.advantage - KL_COEF * later) * chosen + KL_COEF * reached * (value + outside)
    reverse = now.exp() * (now - other) - now.exp() + other.exp()
    return losses.sum(), reverse.sum(-1).detach()


def plain_gradient(
    inputs: Path, run_dir: Path, objective: dict[str, Any], source: str, step: int
) -> tuple[float, float]:
    """Norm of the gradient of a step's update, and the mean reverse KL, by whole logits of plain models."""
    weights = run_dir / f"weights/step-{step - 1:06}" if step > 1 else inputs / "base"
    policy = AutoModelForCausalLM.from_pretrained(weights)
    reference = AutoModelForCausalLM.from_pretrained(inputs / source)
    read = responses(inputs, run_dir, step)
    total = sum(len(ids) for each in read for _, ids in each.turns)
    divergences = []
    for each in read:
        loss, reverse = response_loss(objective, policy, reference, each)
        (loss / total).backward()
        divergences.append(reverse)
    squares = [parameter.grad.square().sum() for parameter in policy.parameters() if parameter.grad is not None]
    return math.sqrt(sum(float(each) for each in squares)), float(torch.cat(divergences).mean())


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_gradient_that_plain_models_give_for_its_record(inputs: Path, tmp_path: Path, case: str) -> None:
    changes = CASES[case]
    objective = {"level": "token", "estimator": "reinforce", **changes["objective"]}
    training = TRAINING | changes.get("training", {})
    source = changes.get("source", "base")
    reference = {"source": "initial"} if source == "base" else {"source": "model", "path": str(inputs / source)}
    run_dir = make_run(
        inputs,
        tmp_path / "run",
        objective={"type": "rpg", "kl_coef": KL_COEF, **objective},
        reference={**reference, "update": None},
        reward=changes.get("reward", {}),
        rollout=changes.get("rollout", {}),
        training=training,
    )
    train(run_dir, ranks=training.get("ranks", 1))
    metrics = {(row["step"], row["name"]): row["value"] for row in rows(run_dir, "metrics")}
    assert metrics[STEP, "kl/reverse"] > 1e-3
    for step in range(1, STEP + 1):
        norm, reverse = plain_gradient(inputs, run_dir, objective, source, step)
        if objective["kl"] == "full":
            assert metrics[step, "kl/reverse"] == pytest.approx(reverse, rel=1e-3, abs=1e-6)
        if "lora" not in training:  # the plain model has no adapters
            assert metrics[step, "grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.more
@pytest.mark.parametrize("kl", ["full", "top_k"])
def test_the_policy_that_sampled_is_the_reference_of_later_updates(inputs: Path, tmp_path: Path, kl: str) -> None:
    """In the first update of a step the two are one policy, so that its tokens have no divergence in any bit."""
    run_dir = make_run(
        inputs,
        tmp_path / "run",
        objective={"type": "rpg", "kl_coef": KL_COEF, "kl": kl, "kl_top_k": 3},
        reference={"source": "behaviour", "update": None},
        training={**TRAINING, "steps": 2, "minibatches": 2},
    )
    train(run_dir)
    metrics = {row["name"]: row["value"] for row in rows(run_dir, "metrics") if row["step"] == 2}
    assert metrics["kl/reverse"] > 1e-5
    tokens = [row for row in rows(run_dir, "tokens") if row["step"] == 2]
    first = [row for row in tokens if row["rollout_id"] < 16]
    assert {row["ratio"] for row in first} == {1.0}
    assert len({row["ratio"] for row in tokens}) > 10
