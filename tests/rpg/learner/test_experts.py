"""Mixtures of experts train as dense models do, and the loss that balances their load is transformers' own."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rpg.learner.policy import Policy
from rpg.routing import balancing_loss, balancing_weight, check_balancing
from specs.errors import SpecError
from specs.schema.training import Training
from tests.rpg.tiny_run import finish, group_of, make_inputs, make_run, rows, start, train

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


@pytest.mark.parametrize("case", [f"{case}x1" for case in ALONE[1:]] + [f"{case}x2" for case in TOGETHER])
def test_five_balanced_updates_of_experts_are_those_of_plain_pytorch(results: Path, case: str) -> None:
    made, by_hand = np.load(results / f"{case}.npz"), np.load(results / "plainx1.npz")
    assert set(made) == set(by_hand)
    errors = {name: np.linalg.norm(made[name] - by_hand[name]) / np.linalg.norm(by_hand[name]) for name in made}
    assert 0 < max(errors.values()) < 1e-5
    assert errors["aux_loss"] < 1e-6


def tiny(**settings: object) -> Policy:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=16, intermediate_size=48, **shape, **experts, **settings)  # type: ignore[arg-type]
    return Policy(Qwen3MoeForCausalLM(config), temperature=1.0, balances=True)


def test_the_balancing_loss_of_all_tokens_is_that_of_transformers_forward() -> None:
    policy = tiny()
    ids = torch.randint(16, (1, 40))
    expected = policy.model(input_ids=ids, output_router_logits=True).aux_loss
    policy(ids, torch.arange(40), ids[0])
    assert policy.routing is not None
    found = balancing_loss(policy.routing.counts, policy.routing.probabilities, 40)
    assert abs(float((found - expected).detach())) < 1e-6
    routers = [weight for name, weight in policy.model.named_parameters() if "mlp.gate" in name]
    gradients = [torch.autograd.grad(loss, routers) for loss in (found, expected)]
    assert all(torch.allclose(*pair, atol=1e-7) and pair[0].any() for pair in zip(*gradients, strict=True))


def test_routing_counts_a_token_as_often_as_it_predicts_one() -> None:
    policy = tiny()
    ids = torch.randint(16, (2, 5))
    policy(ids, torch.tensor([0, 0, 7]), ids[0, :3])
    assert policy.routing is not None
    assert policy.routing.counts.sum(1).tolist() == [6.0, 6.0]
    assert torch.allclose(policy.routing.probabilities.sum(1), torch.tensor(3.0))


def test_a_pass_keeps_no_probabilities_of_routers_where_nothing_is_balanced() -> None:
    policy = Policy(tiny().model, temperature=1.0)
    logprobs, _ = policy(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4), torch.arange(4))
    assert policy.routing is not None
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
    with pytest.raises(SpecError, match="where ranks share sequences"):
        check_balancing(training(router_aux_loss_coef=0.1, sequence_parallel_size=2, ranks=2), tiny().model)


def test_a_model_that_transformers_balances_by_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    own = modeling_qwen3_moe.load_balancing_loss_func
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda *given: 2 * own(*given))
    with pytest.raises(SpecError, match="balances by this loss"):
        check_balancing(training(router_aux_loss_coef=0.1), tiny().model)


def test_no_architecture_of_transformers_keeps_experts_in_a_list() -> None:
    """ZeRO 3 gathers what a module holds itself before it computes, whichever of its experts tokens go to. A list of
    modules would have to be gathered as one (DeepSpeed's `set_z3_leaf_modules`), since ranks call other ones of it."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    lists = [
        path.name
        for path in models.glob("*/modeling_*.py")
        if any("nn.ModuleList(" in line and "xpert" in line for line in path.read_text().splitlines())
    ]
    assert lists == []


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
