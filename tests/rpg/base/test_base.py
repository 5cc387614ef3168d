"""The base model: from scratch, from a directory, warmed up."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from stage_jobs import SPEC
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rpg.base.stage import make
from rpg.base.tokenization import make_tokenizer
from rpg.base.warm_up import _line, learning_rate
from rpg.data.staging import SCHEMA
from specs.errors import Issue, SpecError
from specs.schema.experiment import Experiment
from specs.schema.model import ByteTokenizer, TrainedTokenizer, WarmUp

TEXTS = ["plain text", "1 + 2 = 3", "  spaces\n\tand tabs ", "naïve 数学 🧮", "", "<|endoftex|>"]
COPIES = 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten prompts of several lengths; the answer is the first digit, the last problem has none."""
    directory = tmp_path / "data"
    directory.mkdir()
    prompts = [f"{digit}{'x' * (digit % 4)} =" for digit in range(10)]
    rows = [
        {"problem_id": p, "prompt": p, "answer": p[0] if p[0] != "9" else "", "dataset": "d", "metadata": "{}"}
        for p in prompts
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), directory / "train.parquet")
    return directory


def experiment(model: dict[str, Any] | None = None, **changed: Any) -> Experiment:
    model = model or {}
    spec = {**SPEC, "warm_up": None, **changed}
    spec["model"] = model if "source" in model else {**SPEC["model"], **model}
    return Experiment.model_validate(spec)


def made(out: Path, spec: Experiment, data: Path | None = None) -> dict[str, Any]:
    out.mkdir()
    make(spec, data, out)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def wrong(out: Path, spec: Experiment, data: Path | None = None) -> Issue:
    out.mkdir(exist_ok=True)
    with pytest.raises(SpecError) as caught:
        make(spec, data, out)
    return caught.value.issues[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_machine_that_makes_the_base_model_for_gpus_elsewhere_needs_none(tmp_path: Path, data: Path) -> None:
    warm = {"steps": 2, "batch_size": 4}
    spec = experiment(resources={"device": "cuda"}, warm_up=warm)
    assert len(made(tmp_path / "warm", spec, data)["warm_up"]["losses"]) == 2
    there = experiment({"source": "pretrained", "path": str(tmp_path / "warm")}, resources={"device": "cuda"})
    assert made(tmp_path / "linked", there)["parameters"] > 0


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", [ByteTokenizer(), TrainedTokenizer(vocab_size=300)])
def test_a_tokenizer_gives_back_every_text_and_survives_saving(tmp_path: Path, kind: Any) -> None:
    tokenizer = make_tokenizer(kind, TEXTS * COPIES)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        assert loaded.decode(ids) == text
        assert loaded.decode([*ids, loaded.eos_token_id, loaded.pad_token_id], skip_special_tokens=True) == text
    assert loaded.eos_token_id != loaded.pad_token_id


def test_a_byte_tokenizer_has_a_token_for_each_byte() -> None:
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    assert len(tokenizer) == 258
    assert len(tokenizer("数学")["input_ids"]) == 6


def test_a_trained_tokenizer_merges_what_is_frequent_and_is_the_same_each_time() -> None:
    first, second = (make_tokenizer(TrainedTokenizer(vocab_size=270), ["answer answer"] * COPIES) for _ in range(2))
    assert len(first("answer")["input_ids"]) < 6
    assert first.get_vocab() == second.get_vocab()
    assert len(first) <= 270


def test_a_model_from_scratch_follows_from_its_seed(tmp_path: Path) -> None:
    made(tmp_path / "a", experiment())
    made(tmp_path / "b", experiment())
    made(tmp_path / "c", experiment({"seed": 1}))
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_a_model_from_scratch_loads_and_knows_its_end_token(tmp_path: Path) -> None:
    summary = made(tmp_path / "a", experiment())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    generation = GenerationConfig.from_pretrained(tmp_path / "a")
    assert model.config.vocab_size == len(tokenizer) == 258
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert summary["parameters"] == model.num_parameters()
    assert summary["model_type"] == "qwen3"
    assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("llama", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}), ("gpt2", {"n_embd": 24})],
)
def test_other_architectures_can_be_made(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1}
    summary = made(tmp_path / "a", experiment({"model_type": model_type, "config": {**heads, **config}}))
    assert summary["model_type"] == model_type


def test_a_setting_that_an_architecture_reads_but_does_not_declare_shapes_its_model(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    config = {**small, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
    made(tmp_path / "a", experiment({"model_type": "qwen3_moe", "config": config}))
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (24, 32)


def test_a_trained_tokenizer_is_trained_on_the_training_set(tmp_path: Path, data: Path) -> None:
    spec = experiment({"tokenizer": {"type": "bpe", "vocab_size": 262}})
    assert made(tmp_path / "a", spec, data)["vocabulary"] <= 262


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    problem = wrong(tmp_path, experiment({"model_type": "qwenn3"}))
    assert problem == Issue(
        "transformers knows no such decoder architecture",
        path=("model", "model_type"),
        given="qwenn3",
        hint="did you mean `qwen3`?",
    )


def test_an_unknown_setting_and_one_that_follows_from_the_tokenizer(tmp_path: Path) -> None:
    assert wrong(tmp_path, experiment({"config": {"hiden_size": 32}})) == Issue(
        "qwen3 has no such setting",
        path=("model", "config", "hiden_size"),
        given="32",
        hint="did you mean `hidden_size`?",
    )
    assert wrong(tmp_path, experiment({"config": {"vocab_size": 100}})) == Issue(
        "follows from the tokenizer", path=("model", "config", "vocab_size"), given="100", hint="leave it out"
    )


@pytest.mark.parametrize(
    ("config", "at"),
    [({"head_dim": 31}, ()), ({"hidden_act": "swish2"}, ()), ({"attention_bias": "no"}, ("attention_bias",))],
)
def test_settings_that_do_not_make_a_model(tmp_path: Path, config: dict[str, Any], at: tuple[str, ...]) -> None:
    problem = wrong(tmp_path, experiment({"config": {**SPEC["model"]["config"], **config}}))
    assert problem.message.startswith("transformers cannot build qwen3 with these settings: ")
    assert problem.path == ("model", "config", *at)


def test_a_pretrained_directory_is_linked_not_copied(tmp_path: Path) -> None:
    made(tmp_path / "a", experiment())
    (tmp_path / "a" / "manifest.json").write_text("theirs")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    pretrained = experiment({"source": "pretrained", "path": str(tmp_path / "a")})
    summary = made(tmp_path / "b", pretrained)
    assert (tmp_path / "b" / "model.safetensors").is_symlink()
    assert not (tmp_path / "b" / "manifest.json").exists()
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    assert summary["parameters"] == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "b").parameters()
    )


class _Touch:
    """Unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("warm_up", [None, {"steps": 1}])
def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path, data: Path, warm_up: Any) -> None:
    made(tmp_path / "a", experiment())
    (tmp_path / "a" / "model.safetensors").unlink()
    torch.save(_Touch(tmp_path / "executed"), tmp_path / "a" / "pytorch_model.bin")
    spec = experiment({"source": "pretrained", "path": str(tmp_path / "a")}, warm_up=warm_up)
    problem = wrong(tmp_path / "out", spec, data)
    assert problem.message == "the model has no weights as safetensors"
    assert problem.path == ("model", "path")
    assert "pickled weights (*.bin) can run code and are not read" in problem.hint
    assert not (tmp_path / "executed").exists()


def test_pickles_beside_safetensors_are_left_out(tmp_path: Path) -> None:
    made(tmp_path / "a", experiment())
    torch.save(_Touch(tmp_path / "executed"), tmp_path / "a" / "pytorch_model.bin")
    made(tmp_path / "b", experiment({"source": "pretrained", "path": str(tmp_path / "a")}))
    assert (tmp_path / "b" / "model.safetensors").exists()
    assert not (tmp_path / "b" / "pytorch_model.bin").exists()


def test_a_missing_model_directory(tmp_path: Path) -> None:
    given = str(tmp_path / "nowhere")
    assert wrong(tmp_path / "out", experiment({"source": "pretrained", "path": given})) == Issue(
        "no such model directory", path=("model", "path"), given=given, hint=f"there is no directory {given}"
    )


def test_a_directory_without_a_model_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    spec = experiment({"source": "pretrained", "path": str(directory)})
    assert wrong(tmp_path / "out", spec).message == "the directory contains no model"
    (directory / "config.json").write_text("{")
    (directory / "model.safetensors").write_bytes(b"short")
    assert wrong(tmp_path / "out", spec).message.startswith("the model cannot be loaded: ")


def test_a_hub_model_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    problem = wrong(tmp_path, experiment({"source": "pretrained", "path": "rpg-experiments/no-such-model"}))
    assert problem.message.startswith("the model cannot be fetched from the Hub: ")
    assert problem.path == ("model", "path")
    assert problem.hint == "without a network, give the directory of a downloaded model"


@pytest.mark.more
def test_the_warm_up_teaches_the_answers_and_the_end(tmp_path: Path, data: Path) -> None:
    spec = experiment(warm_up={"steps": 400, "batch_size": 27, "learning_rate": 3e-3})
    losses = made(tmp_path / "a", spec, data)["warm_up"]["losses"]
    assert losses[0] > 4  # about log 258
    assert losses[-1] < 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    prompt = torch.tensor([tokenizer("3xxx =")["input_ids"]])
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=3)
    assert generated[0, prompt.shape[1] :].tolist() == [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]


def test_the_first_loss_is_the_mean_over_the_answers_tokens(tmp_path: Path, data: Path) -> None:
    made(tmp_path / "a", experiment(), data)
    model, tokenizer = (auto.from_pretrained(tmp_path / "a") for auto in (AutoModelForCausalLM, AutoTokenizer))
    total = 0.0
    for digit in range(9):
        prompt = tokenizer(f"{digit}{'x' * (digit % 4)} =")["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(str(digit))["input_ids"], tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        total += model(input_ids=ids, labels=labels).loss.item()  # transformers' own mean over the two answer tokens
    # A batch holds prompts of about one length; before any update that makes little difference.
    losses = made(tmp_path / "b", experiment(warm_up={"steps": 1, "batch_size": 9 * 16}), data)["warm_up"]["losses"]
    assert losses[0] == pytest.approx(total / 9, rel=0.02)


def test_the_warm_up_gives_the_same_bits_again(tmp_path: Path, data: Path) -> None:
    spec = experiment(warm_up={"steps": 5, "batch_size": 4})
    made(tmp_path / "a", spec, data)
    made(tmp_path / "b", spec, data)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_microbatches_do_not_change_what_the_warm_up_learns(tmp_path: Path, data: Path) -> None:
    warm = {"steps": 1, "batch_size": 8}
    whole = made(tmp_path / "a", experiment(warm_up=warm), data)["warm_up"]["losses"]
    split = {**SPEC["training"], "microbatch_tokens": 17}
    parts = made(tmp_path / "b", experiment(warm_up=warm, training=split), data)["warm_up"]["losses"]
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_pretrained_model_can_be_warmed_up_too(tmp_path: Path, data: Path) -> None:
    made(tmp_path / "a", experiment())
    spec = experiment({"source": "pretrained", "path": str(tmp_path / "a")}, warm_up={"steps": 1})
    made(tmp_path / "b", spec, data)
    assert weights(tmp_path / "a") != weights(tmp_path / "b")


def test_the_warm_ups_learning_rate_rises_and_is_held() -> None:
    spec = WarmUp(steps=100, learning_rate=2.0, warmup_fraction=0.1)
    rates = [learning_rate(step, spec) for step in range(100)]
    assert 0 < rates[0] < rates[5] < rates[10] == 2.0
    assert set(rates[10:]) == {2.0}


@pytest.mark.parametrize(
    ("steps", "until_loss", "done", "line"),
    [
        (50, 0.0, False, "warm-up 50/200: loss 0.2000, 10 s, 30 s left"),
        (50, 0.3, False, "warm-up 50/200: loss 0.2000, 10 s, at most 30 s left; ends once 20 average 0.3, now 0.3500"),
        (50, 0.35, True, "warm-up 50/200: loss 0.2000, 10 s"),
        (200, 0.0, True, "warm-up 200/200: loss 0.2000, 10 s"),
    ],
)
def test_a_warm_up_says_how_long_it_goes_on_and_what_it_waits_for(
    steps: int, until_loss: float, done: bool, line: str
) -> None:
    losses = [0.5] * (steps - 10) + [0.2] * 10
    assert _line(losses, WarmUp(steps=200, until_loss=until_loss), 10.0, done=done) == line
