"""Mixtures of experts train as dense models do, and the loss that balances their load is transformers' own."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpg.batches.batch import collate, join, keep, microbatch, select
from rpg.batches.packing_plan import Rows
from rpg.batches.shares import holding
from rpg.learner.packing import ATTENTION, Packing
from rpg.learner.policy import Policy
from rpg.learner.recomputation import recompute_activations
from rpg.rewards.score import Score
from rpg.routing import (
    ReplayedRouters,
    balancing_loss,
    balancing_weight,
    check_balancing,
    check_replay,
    choices_taken,
    pop_choices,
)
from rpg.samplers.transformers.sampler import TransformersSampler
from rpg.types import Rollout, RolloutGroup, Sampling, Turn
from specs.errors import SpecError
from specs.schema.training import Training
from tests.rpg.tiny_run import (
    STEADY,
    assert_trained,
    finish,
    group_of,
    make_inputs,
    make_run,
    rows,
    start,
    start_anew,
    train,
    weights,
)

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
STAGES = [f"{zero}:float32:60" for zero in range(4)]
ALONE = ["plain", *STAGES, "0:float32:1", "0:float32:60:padded", "0:float32:60:recomputed"]
TOGETHER = ["2:float32:60", "3:float32:60"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a mixture of experts after five updates, and its balancing loss, of every case."""
    inputs, out = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("results")
    make_inputs(inputs, experts=BALANCED)
    command = [sys.executable, "-m", "tests.rpg.learner_worker", str(inputs), str(out)]
    ranks = [start([*command, *TOGETHER], environment) for environment in group_of(2)]
    finish(start([*command, *ALONE]), *ranks, seconds=1800)
    return out


@pytest.mark.more
@pytest.mark.parametrize("case", [f"{case}x1" for case in ALONE[1:]] + [f"{case}x2" for case in TOGETHER])
def test_five_balanced_updates_of_experts_are_those_of_plain_pytorch(results: Path, case: str) -> None:
    made, by_hand = np.load(results / f"{case}.npz"), np.load(results / "plainx1.npz")
    assert set(made) == set(by_hand)
    errors = {name: np.linalg.norm(made[name] - by_hand[name]) / np.linalg.norm(by_hand[name]) for name in made}
    assert 0 < max(errors.values()) < 1e-5
    assert errors["aux_loss"] < 1e-6


def tiny(**settings: object) -> Policy:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=16, intermediate_size=48, **{**shape, **experts, **settings})
    return Policy(Qwen3MoeForCausalLM(config), temperature=1.0, balances=True)


def test_the_balancing_loss_of_all_tokens_is_that_of_transformers_forward() -> None:
    policy = tiny()
    ids = torch.randint(16, (1, 40))
    expected = policy.model(input_ids=ids, output_router_logits=True).aux_loss
    policy(ids, torch.arange(40), ids[0])
    found = balancing_loss(policy.routing.counts, policy.routing.probabilities, 40)
    assert abs(float((found - expected).detach())) < 1e-6
    routers = [weight for name, weight in policy.model.named_parameters() if "mlp.gate" in name]
    gradients = [torch.autograd.grad(loss, routers) for loss in (found, expected)]
    assert all(torch.allclose(*pair, atol=1e-7) and pair[0].any() for pair in zip(*gradients, strict=True))


def test_routing_counts_a_token_as_often_as_it_predicts_one() -> None:
    policy = tiny()
    ids = torch.randint(16, (2, 5))
    policy(ids, torch.tensor([0, 0, 7]), ids[0, :3])
    assert policy.routing.counts.sum(1).tolist() == [6.0, 6.0]
    assert torch.allclose(policy.routing.probabilities.sum(1), torch.tensor(3.0))


def test_a_pass_keeps_no_probabilities_of_routers_where_nothing_is_balanced() -> None:
    policy = Policy(tiny().model, temperature=1.0)
    logprobs, _ = policy(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4), torch.arange(4))
    assert not policy.routing.probabilities.requires_grad
    assert logprobs.requires_grad


def training(**changes: object) -> Training:
    return Training.model_validate({"steps": 1, "prompts_per_step": 1, "group_size": 1, **changes})


def test_the_weight_is_the_specs_or_else_that_of_a_configuration_that_shows_its_routers() -> None:
    shown, hidden = (
        tiny(router_aux_loss_coef=0.02, output_router_logits=shows).model.config for shows in (True, False)
    )
    assert balancing_weight(training(), hidden) == 0
    assert balancing_weight(training(), shown) == 0.02
    assert balancing_weight(training(router_aux_loss_coef=0), shown) == 0
    assert balancing_weight(training(router_aux_loss_coef=0.5), hidden) == 0.5


def test_a_balance_of_experts_that_a_model_has_not_is_refused() -> None:
    from transformers import DeepseekV3Config, Qwen3Config

    from rpg.pretrained import model_without_weights

    balanced = training(router_aux_loss_coef=0.1)
    for config in (Qwen3Config(num_hidden_layers=1), DeepseekV3Config(num_hidden_layers=1)):
        model = model_without_weights(config)
        check_balancing(training(), model)
        with pytest.raises(SpecError, match="no experts that transformers balances by this loss"):
            check_balancing(balanced, model)
    check_balancing(balanced, tiny().model)
    with pytest.raises(SpecError, match="if ranks share sequences"):
        check_balancing(training(router_aux_loss_coef=0.1, sequence_parallel_size=2, ranks=2), tiny().model)


def test_a_model_that_transformers_balances_by_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    own = modeling_qwen3_moe.load_balancing_loss_func
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda *given: 2 * own(*given))
    with pytest.raises(SpecError, match="balances by this loss"):
        check_balancing(training(router_aux_loss_coef=0.1), tiny().model)


def test_no_architecture_of_transformers_keeps_experts_in_a_list() -> None:
    """ZeRO 3 gathers a module's own parameters before it computes, whichever of its experts tokens go to. A list of
    modules would have to be gathered as one (DeepSpeed's `set_z3_leaf_modules`), since ranks call other ones of it."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    lists = [
        path.name
        for path in models.glob("*/modeling_*.py")
        if any("nn.ModuleList(" in line and "xpert" in line for line in path.read_text().splitlines())
    ]
    assert lists == []


@pytest.mark.more
def test_a_run_of_experts_records_their_load_and_exports_what_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_inputs(tmp_path, experts={})
    run_dir = make_run(tmp_path, tmp_path / "run", training={"steps": 2, "zero_stage": 3})
    train(run_dir)
    loads = {row["name"]: row["value"] for row in rows(run_dir, "metrics") if row["step"] == 2}
    assert 1 <= loads["experts/largest_load"] <= 2
    assert 0 <= loads["experts/idle_fraction"] < 1
    assert 1.5 < loads["aux_loss"] < 4
    (exported,) = (run_dir / "weights").glob("step-*")
    model = AutoModelForCausalLM.from_pretrained(exported)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert all((after - old).abs().max() > 1e-4 for after, old in pairs)


def replaying() -> Policy:
    policy = tiny()
    policy.routers = ReplayedRouters(policy.model)
    return policy


def choices(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """Experts that the routers choose by themselves. [tokens, layers, experts a token]"""
    with choices_taken(policy.model) as taken, torch.no_grad():
        policy(ids, torch.arange(1), ids[0, :1])
    return torch.from_numpy(pop_choices(taken))


@pytest.mark.parametrize("recomputes", [False, True, "selective"])
def test_a_replay_of_the_own_choice_has_the_same_bits_and_of_another_choice_others(recomputes: bool | str) -> None:
    policy, ids = replaying(), torch.randint(16, (1, 40))
    policy.model.train()
    if recomputes:
        recompute_activations(policy.model, selective=recomputes == "selective")
    own = choices(policy, ids)
    found = []
    for experts in (None, own, own.flip(0), own.flip(0)):
        policy.zero_grad()
        logprobs, _ = policy(ids, torch.arange(39), ids[0, 1:], experts=experts)
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(weight.grad for weight in policy.parameters())])
    plain, replayed, other, again = found
    assert all(map(torch.equal, plain, replayed))
    assert all(map(torch.equal, other, again))
    assert not torch.allclose(plain[0], other[0], atol=1e-3)


def test_given_experts_weigh_what_their_router_gives_them() -> None:
    policy, hidden = replaying(), torch.randn(1, 5, 32)
    block: Any = policy.model.model.layers[1].mlp
    given = torch.tensor([[0, 5], [1, 2], [4, 3], [2, 0], [5, 1]])
    policy.routers.give(given[:, None].expand(5, 2, 2))
    found = block(hidden)[0]
    policy.choose_experts()
    probabilities = torch.softmax(hidden[0] @ block.gate.weight.T, dim=-1).gather(1, given)
    if block.gate.norm_topk_prob:
        probabilities = probabilities / probabilities.sum(1, keepdim=True)
    for token in range(5):
        expected = torch.zeros(32)
        for weight, expert in zip(probabilities[token], given[token].tolist(), strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ hidden[0, token]).chunk(2)
            expected = expected + weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(found[token], expected, atol=1e-6)


def test_only_models_whose_choice_can_be_replayed_are_taken() -> None:
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3Config

    check_replay(tiny().model.config)
    check_replay(MixtralConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1))
    check_replay(DeepseekV3Config(num_hidden_layers=4))
    with pytest.raises(SpecError, match="no experts whose choice can be replayed"):
        check_replay(Qwen3Config(num_hidden_layers=1))


def test_a_choice_for_other_layers_than_the_model_has_is_refused() -> None:
    policy, ids = replaying(), torch.randint(16, (1, 4))
    with pytest.raises(RuntimeError, match="the experts of 3 layers; 2 have routers"):
        policy(ids, torch.arange(3), ids[0, 1:], experts=torch.zeros(4, 3, 2))


def test_a_choice_told_for_layers_without_experts_too_is_the_same() -> None:
    """vLLM has a column for every layer; those without a router mean nothing."""
    policy, ids = (
        Policy(tiny(mlp_only_layers=[0, 2], num_hidden_layers=4).model, temperature=1.0),
        torch.arange(12)[None],
    )
    policy.routers = ReplayedRouters(policy.model)
    own = choices(policy, ids).flip(0)
    of_layers = torch.zeros(12, 4, 2, dtype=own.dtype)
    of_layers[:, [1, 3]] = own
    found = [policy(ids, torch.arange(11), ids[0, 1:], experts=experts)[0] for experts in (own, of_layers)]
    assert torch.equal(*found)


def test_the_sampler_tells_the_experts_that_one_pass_over_the_response_has() -> None:
    policy = tiny()
    sampler = TransformersSampler(policy.model, eos_id=1, pad_id=0, max_concurrent=3, max_length=64)
    prompts = [[3, 4, 5], [6], [2, 9, 9, 8, 7], [6], [4, 4]]
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=9, tells_experts=True)
    groups = sampler.generate(prompts, group_size=3, sampling=sampling, seeds=range(5))
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group.rollouts:
            ids = torch.tensor([[*prompt, *rollout.response_ids]])
            assert rollout.experts is not None
            expected = choices(policy, ids)[:-1].sort(-1).values
            assert torch.equal(torch.from_numpy(rollout.experts).sort(-1).values, expected)


@pytest.mark.parametrize("packed", [True, False])
def test_each_token_of_a_pass_has_the_experts_that_the_sampler_sent_it_to(packed: bool) -> None:
    responses = [(3, 4, 5), (6,), (11, 12), (13,)]
    prompts = [(1, 2), (1, 2), (10,), (10,)]
    rollouts = [
        Rollout((Turn(ids, (0.0,) * len(ids)),), "stop", experts=np.array([[[id, 0]] for id in (*prompt, *ids)][:-1]))
        for prompt, ids in zip(prompts, responses, strict=True)
    ]
    groups = [RolloutGroup((1, 2), tuple(rollouts[:2]), 0), RolloutGroup((10,), tuple(rollouts[2:]), 0)]
    scores = [Score(value=0.0, correct=False)] * 4
    step = collate(groups, problems=[0, 1], responses=[""] * 4, scores=scores)
    for batch in (step, join([step, step]), select(step, [1, 0]), holding(step, [keep(step, np.array([1, 3, 0, 2]))])):
        index = tuple(reversed(range(len(batch.lengths)))) if not packed else tuple(range(len(batch.lengths)))
        made = microbatch(batch, Rows(index), torch.device("cpu"), packed=packed)
        assert made.experts.shape == (made.input_ids.numel(), 1, 2)
        ids, told = made.input_ids.flatten(), made.experts[:, 0, 0]
        assert torch.equal(told[made.sources].long(), ids[made.sources]), "those that a logprob follows from"


@pytest.mark.more
def test_replayed_logprobs_are_nearer_to_the_samplers() -> None:
    """In bfloat16 the sampler's steps and the learner's passes round otherwise, so that some tokens go elsewhere."""
    shape = {"hidden_size": 64, "num_hidden_layers": 8, "num_experts": 32, "moe_intermediate_size": 32, "head_dim": 32}
    policy = tiny(**shape, initializer_range=0.2)
    policy.model.bfloat16().eval()
    policy.routers = ReplayedRouters(policy.model)
    sampler = TransformersSampler(policy.model, eos_id=1, pad_id=0, max_concurrent=8, max_length=64)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_response_length=32, tells_experts=True)
    prompts = [[3, 4, 5], [2, 9, 9, 8, 7], [6], [4, 4]]
    groups = sampler.generate(prompts, group_size=4, sampling=sampling, seeds=range(4))
    step = collate(groups, problems=[0] * 4, responses=[""] * 16, scores=[Score(value=0.0, correct=False)] * 16)
    batch = microbatch(step, Rows(tuple(range(16))), torch.device("cpu"), packed=True)
    policy.model.config._attn_implementation = ATTENTION
    apart = []
    for experts in (None, batch.experts):
        packing = Packing(batch.packed, torch.device("cpu"))
        with torch.no_grad():
            found, _ = policy(batch.input_ids, batch.sources, batch.targets, packing=packing, experts=experts)
        apart.append((found - batch.rollout_logprobs).abs())
    chosen, replayed = apart
    assert replayed.mean() < 0.8 * chosen.mean()
    assert replayed.max() < 0.5 * chosen.max()


@pytest.mark.more
@pytest.mark.parametrize(
    ("recomputes", "zero_stage"), [("selective", 0), pytest.param(False, 3, marks=pytest.mark.long)]
)
def test_a_run_that_replays_the_choice_its_learner_makes_too_has_the_same_weights(
    tmp_path: Path, recomputes: bool | str, zero_stage: int
) -> None:
    """In float32 sampler and learner choose alike."""
    make_inputs(tmp_path, experts={})
    runs = []
    for replays in (False, True):
        training = {"steps": 2, "minibatches": 1, "zero_stage": zero_stage, "gradient_checkpointing": recomputes}
        rollout = {"replay_routing": replays}
        training["optimizer"] = STEADY
        runs.append(make_run(tmp_path, tmp_path / f"run-{replays}", rollout=rollout, training=training))
        train(runs[-1])
    plain, replayed = map(weights, runs)
    assert all(torch.allclose(plain[name], replayed[name], atol=1e-6) for name in plain)


@pytest.mark.more
@pytest.mark.parametrize("zero_stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_hand_the_experts_of_a_response_over_with_its_tokens(tmp_path: Path, zero_stage: int) -> None:
    """Two ranks that replay have the weights of one that does not: in float32 all choose alike."""
    make_inputs(tmp_path, experts={})
    ends = []
    for number, replays in ((1, False), (2, True)):
        training = {"steps": 2, "minibatches": 1, "zero_stage": zero_stage, "ranks": number, "optimizer": STEADY}
        rollout = {"replay_routing": replays}
        run_dir = make_run(tmp_path, tmp_path / f"run-{number}", training=training, rollout=rollout)
        train(run_dir, ranks=number)
        assert_trained(run_dir)
        ends.append(weights(run_dir))
    alone, together = ends
    assert all(torch.allclose(alone[name], together[name], atol=1e-5) for name in alone)


_TOLD_OTHERS = """
import runpy, sys
from rpg import routing
from rpg.samplers.transformers import decoding

decoding.pop_choices = lambda taken: (routing.pop_choices(taken) + 1) % 4
sys.argv = ["rpg.train", sys.argv[1]]
runpy.run_module("rpg.train", run_name="__main__", alter_sys=True)
"""
"""`rpg.train` whose sampler tells of each token the experts after those that it was sent to."""


@pytest.mark.more
@pytest.mark.parametrize("replays", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_learner_goes_by_what_the_sampler_tells_and_the_reference_by_its_own_choice(
    tmp_path: Path, replays: bool
) -> None:
    make_inputs(tmp_path, experts={})
    run_dir = make_run(
        tmp_path,
        tmp_path / "run",
        rollout={"replay_routing": replays},
        training={"steps": 1, "minibatches": 1},
        reference={"source": "initial", "update": None},
    )
    finish(start_anew([sys.executable, "-c", _TOLD_OTHERS, str(run_dir)]))
    metrics = {row["name"]: row["value"] for row in rows(run_dir, "metrics") if row["step"] == 1}
    assert (metrics["kl/rollout"] > 1e-8) == replays, "the policy's logprobs are of other experts than the sampler's"
    assert (metrics["kl/reverse"] > 1e-8) == replays, "the reference has the policy's weights, and its own experts"


def test_the_load_of_experts_is_counted_where_tokens_are_sent() -> None:
    policy, ids = replaying(), torch.randint(16, (1, 12))
    policy(ids, torch.arange(11), ids[0, 1:], experts=torch.tensor([1, 4]).expand(12, 2, 2))
    assert policy.routing.counts.tolist() == [[0, 11, 0, 0, 11, 0]] * 2


@pytest.mark.parametrize("architecture", ["Llama4Text", "MiniMaxM2"])
def test_routers_that_tell_no_choice_or_need_more_than_hidden_states_are_refused(architecture: str) -> None:
    import transformers

    config = getattr(transformers, f"{architecture}Config")(num_hidden_layers=1)
    with pytest.raises(SpecError, match="no experts whose choice can be replayed"):
        check_replay(config)


def test_a_router_that_makes_its_choice_in_another_way_is_not_passed_over() -> None:
    policy, ids = replaying(), torch.randint(16, (1, 4))
    router: Any = policy.model.model.layers[0].mlp.gate
    router.top_k = 3
    with pytest.raises(RuntimeError, match="a router makes 0 choices"):
        policy(ids, torch.arange(3), ids[0, 1:], experts=torch.zeros(4, 2, 2))
