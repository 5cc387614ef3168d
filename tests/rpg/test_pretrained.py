"""A model's own code is never run: settings that name code are refused by name, wherever a model is read."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from stage_jobs import SPEC

from rpg import pretrained
from rpg.base.stage import make
from rpg.preflight import examine
from specs.errors import SpecError
from specs.schema.experiment import Experiment

TELLTALE = "open({path!r}, 'w').close()\nclass Mine: pass\n"
MAP = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine", "AutoTokenizer": ["mine.Mine", None]}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "code for the config and the model": ("config.json", {"auto_map": MAP}, "config.json: auto_map"),
    "of an architecture that transformers does not know": (
        "config.json",
        {"auto_map": MAP, "model_type": "mine"},
        "config.json: auto_map",
    ),
    "code for the tokenizer": ("tokenizer_config.json", {"auto_map": MAP}, "tokenizer_config.json: auto_map"),
    "a kernel": (
        "config.json",
        {"attn_implementation": "kernels-community/flash-attn"},
        "config.json: attn_implementation (kernels-community/flash-attn)",
    ),
    "a kernel under the name that transformers writes": (
        "config.json",
        {"_attn_implementation": "somebody/attention:run"},
        "config.json: _attn_implementation (somebody/attention:run)",
    ),
    "a kernel of a part": (
        "config.json",
        {"text_config": {"attn_implementation": {"": "somebody/attention"}}},
        "config.json: text_config.attn_implementation (somebody/attention)",
    ),
    "adapters of another model, which may name code": (
        "adapter_config.json",
        {"peft_type": "LORA", "base_model_name_or_path": "somebody/model"},
        "adapter_config.json, adapters of another model: merge them into it first",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make(Experiment.model_validate({**SPEC, "warm_up": None}), None, directory)
    return directory


@pytest.fixture(params=CASES)
def hostile(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> tuple[Path, str]:
    """A model with code of its own, and the setting that names it."""
    name, settings, said = CASES[request.param]
    directory = tmp_path / "model"
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    there = json.loads((directory / name).read_text()) if (directory / name).exists() else {}
    (directory / name).write_text(json.dumps(there | settings))
    (directory / "mine.py").write_text(TELLTALE.format(path=str(tmp_path / "telltale")))
    return directory, said


def test_a_model_that_names_code_is_refused_before_and_in_the_base_stage(
    hostile: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, said = hostile
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked
    source = {"source": "pretrained", "path": str(directory)}
    for warm_up in (None, SPEC["warm_up"]):
        spec = Experiment.model_validate({**SPEC, "warm_up": warm_up, "model": source})
        (found,) = examine(spec).errors
        with pytest.raises(SpecError) as refused:
            make(spec, tmp_path, tmp_path / "out")
        for issue in (found, *refused.value.issues):
            assert issue.message == f"the model has its own code, which is never executed: {said}"
            assert issue.path == ("model", "path")
    assert not (tmp_path / "telltale").exists()


def test_a_model_that_names_code_is_read_nowhere(hostile: tuple[Path, str], tmp_path: Path) -> None:
    directory, said = hostile
    for read in (pretrained.config_of, pretrained.tokenizer_of, pretrained.model_of):
        with pytest.raises(pretrained.ModelCodeError, match=re.escape(said)):
            read(directory)
    assert not (tmp_path / "telltale").exists()


def test_a_model_without_code_is_read(model: Path) -> None:
    assert pretrained.config_of(model).model_type == SPEC["model"].get("model_type", "qwen3")
    assert pretrained.model_of(model).num_parameters() > 0
    assert pretrained.tokenizer_of(model).eos_token_id is not None


def test_a_model_from_scratch_names_no_kernel() -> None:
    for setting in ("attn_implementation", "_attn_implementation"):
        model = {**SPEC["model"], "config": {**SPEC["model"]["config"], setting: "kernels-community/flash-attn"}}
        (issue,) = examine(Experiment.model_validate({**SPEC, "model": model})).errors
        assert f"{setting} (kernels-community/flash-attn)" in issue.message
        assert issue.path == ("model", "config")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation (flash_attention_2,"),
        ({"_attn_implementation": "paged|flash_attention_3"}, "_attn_implementation (paged|flash_attention_3,"),
        (
            {"text_config": {"attn_implementation": {"": "flash_attention_4"}}},
            "attn_implementation (flash_attention_4,",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config.quant_method (mxfp4,"),
        ({"model_type": "rwkv"}, "model_type (rwkv,"),
    ],
)
def test_what_fetches_a_kernel_is_refused_where_it_could_be_fetched(
    settings: dict[str, Any], named: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernels` is installed and no flash attention is."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    monkeypatch.setattr(pretrained, "find_spec", lambda name: object() if name == "kernels" else None)
    with pytest.raises(pretrained.ModelCodeError, match=re.escape(named) + ".*uninstall the package kernels"):
        pretrained.model_of(directory)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: object() if name != "kernels" else None)
    assert not pretrained.settings_with_code(directory)
    monkeypatch.setattr(pretrained, "find_spec", lambda _name: object())
    computed_here = named.partition("flash_attention")[1]
    assert bool(pretrained.settings_with_code(directory)) != bool(computed_here)


@pytest.mark.more
def test_transformers_fetches_no_kernel_by_itself() -> None:
    """Mamba's scans, experts and norms, whichever of our modules is imported first."""
    code = (
        "import rpg.learner.policy; from transformers.integrations import hub_kernels as it; print(it._kernels_enabled)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "USE_HUB_KERNELS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


def test_a_hub_model_that_was_downloaded_is_looked_at(
    hostile: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, said = hostile
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    directory.rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = {"source": "pretrained", "path": "some/model"}
    (issue,) = examine(Experiment.model_validate({**SPEC, "warm_up": None, "model": model})).errors
    assert issue.message == f"the model has its own code, which is never executed: {said}"


def test_a_data_set_with_a_script_is_refused(tmp_path: Path) -> None:
    from rpg.data.sources.hub import HubSource

    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "data.py").write_text(TELLTALE.format(path=str(tmp_path / "telltale")))
    source = HubSource(source="hub", path=str(directory))
    for rows in (source.read(), source.peek(1)):
        with pytest.raises(SpecError, match="cannot be loaded"):
            list(rows)
    assert not (tmp_path / "telltale").exists()


def test_one_place_reads_models_and_every_engine_is_told_to_trust_no_code() -> None:
    for path in (*ROOT.glob("rpg/**/*.py"), *ROOT.glob("pipelines/**/*.py")):
        text = path.read_text()
        assert path.name == "pretrained.py" or not re.search(r"= Auto\w+\.from_pretrained\(", text), path
        assert "trust_remote_code=True" not in text, path
        assert text.count("LLM(\n") == text.count("trust_remote_code=False,\n") or path.name == "pretrained.py", path
