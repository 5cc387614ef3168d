"""The figures of models against transformers' own count of them, and against what their makers publish."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelines.home.home import Home
from pipelines.jobs.plan import _algebra
from pipelines.planning import model_shape
from pipelines.planning.plan import make_plan
from rpg.base.shape import shape_of_config
from specs.loader import load_document

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("model_configs.json").read_text())
PUBLISHED = {
    "Qwen3-30B-A3B": (30_532_122_624, 3.3e9),
    "Mixtral-8x7B": (46_702_792_704, 12.9e9),
    "DeepSeek-V2-Lite": (15_706_484_224, 2.7e9),
    "gpt-oss-20b": (20_914_757_184, 4.2e9),
    "OLMoE-1B-7B": (6_919_161_856, 1.3e9),
    "Llama-3.1-8B": (8_030_261_248, 8_030_261_248),
    "Qwen2.5-7B": (7_615_616_512, 7_615_616_512),
    "gemma-2-2b": (2_614_341_888, 2_614_341_888),
    "Phi-3-mini-4k": (3_821_079_552, 3_821_079_552),
    "gpt2": (124_439_808, 124_439_808),
    "falcon-7b": (6_921_720_704, 6_921_720_704),
}
"""Parameters in the published weights, and those that a token meets, with the embeddings of its vocabulary."""
SPEC = """\
name: sizes
matrix: {{product: {{model.path: {paths}}}}}
model: {{source: pretrained, path: {first}}}
data: {{train: [{{source: reasoning_gym, task: chain_sum, size: 50, seed: 1}}]}}
reward: {{type: exact_match}}
objective: {{type: rpg, kl_coef: 1.0e-2}}
training: {{steps: 3, prompts_per_step: 4, group_size: 2, minibatches: 2}}
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing has been counted yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_shape._kept_or_counted.cache_clear()
    return tmp_path / "cache"


def planned(tmp_path: Path, names: list[str]) -> dict[str, Any]:
    """What `rpg plan` says of each model's memory and parameters."""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIGS[name]))
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(paths=json.dumps(names), first=names[0]))
    home = {"RPG_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", "from pipelines.cli import main; main()", "plan", str(spec), "--json"]
    done = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, check=False)
    runs = json.loads(done.stdout)["runs"]  # the directories have no weights, which it says as well
    return {name: run["memory"] for name, run in zip(names, runs, strict=True)}


def counted(name: str) -> int:
    """Transformers' own count."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))
    return int(model.num_parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_transformers_count_and_what_is_published(name: str) -> None:
    shape = shape_of_config(CONFIGS[name])
    parameters, active = PUBLISHED[name]
    assert shape.parameters == counted(name) == parameters
    assert shape.active_parameters == pytest.approx(active, rel=0.03)
    assert shape.matrix_parameters <= shape.active_parameters <= shape.parameters
    assert shape.read_parameters <= shape.parameters
    has_experts = bool(shape.experts_per_token)
    assert has_experts == (active < parameters) == bool(shape.expert_parameters) == bool(shape.router_parameters)


@pytest.mark.long
def test_a_mixture_of_experts_is_planned_with_all_of_them(tmp_path: Path) -> None:
    """By hand: 48 layers of 128 experts of 3 x 2048 x 768, and of a router of 128 x 2048."""
    memory = planned(tmp_path, ["Qwen3-30B-A3B"])["Qwen3-30B-A3B"]
    assert memory["parameters"] == 30_532_122_624
    assert memory["expert_parameters"] == 48 * 128 * 3 * 2048 * 768
    assert memory["router_parameters"] == 48 * 128 * 2048
    assert memory["active_parameters"] == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768
    assert memory["weights"] == 4 * 30_532_122_624


@pytest.mark.long
def test_plans_agree_with_transformers_count_of_each_architecture(tmp_path: Path) -> None:
    planned_models = planned(tmp_path, list(CONFIGS))
    assert {name: memory["parameters"] for name, memory in planned_models.items()} == {
        name: counted(name) for name in CONFIGS
    }


@pytest.mark.more
def test_a_configuration_is_counted_once_in_a_child_without_torch_here(empty_cache: Path) -> None:
    code = (
        "import json, sys\nfrom pipelines.planning.model_shape import shape_of_settings\n"
        "from pipelines.processes.forking import has_forked, may_fork\n"
        "parameters = shape_of_settings(json.load(sys.stdin)).parameters\n"
        "print(parameters, 'torch' in sys.modules, has_forked() == may_fork())"
    )
    text, cache = json.dumps(CONFIGS["gpt2"]), {"XDG_CACHE_HOME": str(empty_cache)}

    command = [sys.executable, "-c", code]
    # Where a warning is an error, a fork that had imported its own program would not count.
    strict = os.environ | cache | {"PYTHONWARNINGS": "error::RuntimeWarning"}
    done = subprocess.run(command, input=text, env=strict, capture_output=True, text=True, check=True)
    assert done.stdout == "124439808 False True\n", "a look at the model begins with the count's imports"

    def known() -> int:
        model_shape._kept_or_counted.cache_clear()
        shape = model_shape.shape_of_settings(CONFIGS["gpt2"])
        return shape.parameters

    (kept,) = empty_cache.glob("rpg/planning/model-shapes/*.json")
    kept.write_text(kept.read_text().replace("124439808", "5"))
    assert known() == 5, "what is kept is taken"
    kept.write_text("{")
    assert known() == 124439808, "what is damaged is counted again"


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "no_such_type"},
        pytest.param({"model_type": "llama", "hidden_size": 65, "num_attention_heads": -1}, marks=pytest.mark.long),
        pytest.param(
            {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, marks=pytest.mark.long
        ),
    ],
)
def test_what_builds_no_model_has_no_shape(settings: dict[str, Any]) -> None:
    assert model_shape.shape_of_settings(settings) is None


@pytest.mark.more
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("nobody/model", "the model's config is not on this machine yet"),
        ("not/made/yet", "the model's config is not on this machine yet"),
        pytest.param(
            {"model_type": "of-nobody"}, "transformers cannot build it from its config", marks=pytest.mark.long
        ),
    ],
)
def test_a_plan_says_why_it_estimates_no_memory(config: dict[str, Any] | str, why: str, tmp_path: Path) -> None:
    path = config if isinstance(config, str) else str(tmp_path)
    if isinstance(config, dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(paths=json.dumps([path]), first=path))
    made = make_plan(load_document(spec), Home(tmp_path / "home"))
    assert f"memory  unknown, and so are GPU hours: {why}" in _algebra(made)


def test_sizes_that_differ_between_layers_count_as_the_largest() -> None:
    """Gemma 4 has heads of 256 and, in every sixth layer, of 512; transformers refuses to read them from the whole."""
    shape = shape_of_config({"model_type": "gemma4_text", "num_hidden_layers": 6})
    assert (shape.layers, shape.attention_size) == (6, 8 * 512)


@pytest.mark.parametrize("sources", [["behaviour", "initial"], ["initial", "behaviour"]])
def test_a_plan_shows_the_memory_of_the_run_that_needs_most(sources: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt2"] | {"n_positions": 2048}))
    spec = tmp_path / "spec.yaml"
    text = SPEC.format(paths=json.dumps([str(tmp_path)]), first=str(tmp_path))
    spec.write_text(text.replace("matrix: {product: {", f"matrix: {{product: {{reference.source: {sources}, "))
    (memory,) = (line for line in _algebra(make_plan(load_document(spec), Home(tmp_path / "home"))) if "memory" in line)
    assert "reference 0.47 GiB" in memory
    assert "; the most of any run, another needs " in memory
