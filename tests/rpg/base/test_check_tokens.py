"""Findings about tokens, and about rows whose answers few responses can match, before a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rpg.base.warm_up import end_token
from rpg.preflight import Findings, examine
from rpg.pretrained import end_texts, special_tokens
from rpg.tools.calls import around_words
from specs.document import experiment_of
from specs.errors import SpecError

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"prompt": "1+1", "answer": "2"}


def tokenizer(end: str | None = "<|im_end|>", template: str = CHAT) -> Any:
    """One token a character, and four control tokens behind them."""
    characters = [*map(chr, range(32, 127)), "\n"]
    model = Tokenizer(models.BPE({each: index for index, each in enumerate(characters)}, []))
    model.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=end, clean_up_tokenization_spaces=False)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|end|>"]})
    made.chat_template = template
    return made


def save(directory: Path, made: Any, *, lacking: int = 0, ends: Any = None) -> LlamaForCausalLM:
    """A model whose embedding has all tokens but the last few, whose generation config names end tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"eos_token_id": made.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(made) - lacking, **sizes, **special))
    model.generation_config = GenerationConfig(eos_token_id=made.eos_token_id if ends is None else ends)
    model.save_pretrained(directory)
    made.save_pretrained(directory)
    return model


def looked_at(directory: Path, *rows: dict[str, Any], kind: str = "chat", reward: str = "exact_match") -> Findings:
    (directory / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or (QUESTION,)))
    source = {"source": "jsonl", "path": str(directory / "d.jsonl"), "columns": {"answer": "answer"}}
    spec = {
        "name": "looked-at",
        "model": {"source": "pretrained", "path": str(directory)},
        "data": {"train": [source], "prompt": {"type": kind}},
        "rollout": {"engine": "transformers", "max_response_length": 8},
        "reward": {"type": reward},
        "objective": {"type": "rpg", "kl_coef": 0.01},
        "training": {"steps": 1, "prompts_per_step": 2, "group_size": 2, "minibatches": 1},
    }
    return examine(experiment_of(spec, {}), model=False)


def test_a_model_with_its_own_tokenizer_gives_no_finding(tmp_path: Path) -> None:
    save(tmp_path, tokenizer())
    assert looked_at(tmp_path) == Findings()
    assert looked_at(tmp_path, kind="template") == Findings()


def test_tokens_of_the_template_that_the_embedding_lacks_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, tokenizer(), lacking=3)
    (error,) = looked_at(tmp_path).errors
    assert error.message == "the tokenizer has ids up to 98, and the model's embedding has 96 rows"
    assert error.given == "`<|im_end|>` (96), `<|im_start|>` (97), in d.jsonl, line 1"


def test_an_end_token_that_the_embedding_lacks_is_an_error_for_plain_prompts_too(tmp_path: Path) -> None:
    save(tmp_path, tokenizer(end="<|last|>"), lacking=3)
    assert looked_at(tmp_path, kind="template").errors == []  # `<|last|>` is the first of the control tokens
    save(tmp_path, tokenizer(end="<|last|>"), lacking=4)
    (error,) = looked_at(tmp_path, kind="template").errors
    assert error.given == "`<|last|>` (96)"


def test_a_token_that_no_prompt_has_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, tokenizer(), lacking=1)
    findings = looked_at(tmp_path)
    assert findings.errors == []
    (warning,) = findings.warnings
    assert warning.given == "`<|end|>` (98)"
    (error,) = looked_at(tmp_path, {"prompt": "1+1<|end|>", "answer": "2"}).errors
    assert error.given == "`<|end|>` (98), in d.jsonl, line 1"


def test_a_padding_token_outside_the_embedding_pads_nothing(tmp_path: Path) -> None:
    made = tokenizer()
    made.add_special_tokens({"pad_token": "<pad>"})
    save(tmp_path, made, lacking=1)
    assert special_tokens(tmp_path).pad_id == made.eos_token_id


def test_an_end_token_behind_plain_prompts_is_a_warning(tmp_path: Path) -> None:
    made = tokenizer()
    end = (made.eos_token, made.eos_token_id)
    made.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    save(tmp_path, made)
    (warning,) = looked_at(tmp_path, QUESTION, {"prompt": "2+2", "answer": "4"}, kind="template").warnings
    assert warning.message == "2 of the first 2 prompts end with the end token `<|im_end|>`"
    assert warning.given == "d.jsonl, line 1; d.jsonl, line 2"
    assert looked_at(tmp_path) == Findings()  # a chat template writes all tokens itself


def test_a_template_without_the_beginning_of_a_reply_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, tokenizer(template="{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"))
    (warning,) = looked_at(tmp_path).warnings
    assert "add_generation_prompt" in warning.hint


PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (PARTS, "leaves out the messages: it renders all prompts as the same text"),
        ("{{ m.content[0].text }}", "leaves out the messages: it renders all prompts as the same text"),
        ("{{ m.value }}", "leaves out the messages: it renders all prompts as the same text"),
        ("{{ m.content }}{{ '\\ud800' }}", "writes half a character into prompt 1"),
    ],
)
def test_a_template_that_loses_the_messages_is_an_error(tmp_path: Path, written: str, message: str) -> None:
    save(tmp_path, tokenizer(template=CHAT.replace("{{ m.content }}", written)))
    (error,) = looked_at(tmp_path, QUESTION, {"prompt": "2+2", "answer": "4"}).errors
    assert error.path == ("data", "prompt")
    assert message in error.message


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (CHAT.replace("in messages", "in messages if m.role != 'system'"), "system"),
        (CHAT.replace("in messages", "in messages[:1]"), "user"),
        (CHAT.replace("m.content", "m.content[:1]"), "system"),
    ],
)
def test_a_template_that_leaves_out_a_message_is_a_warning(tmp_path: Path, template: str, role: str) -> None:
    save(tmp_path, tokenizer(template=template))
    prompt = [{"role": "system", "content": "Add. "}, {"role": "user", "content": "1"}]
    (warning,) = looked_at(tmp_path, {"prompt": prompt, "answer": "1"}).warnings
    assert warning.message == f"the chat template leaves out or changes the text of {role} messages"
    assert warning.given == "d.jsonl, line 1"


def test_an_end_of_turn_that_ends_no_response_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, tokenizer(template=CHAT.replace("<|im_end|>", "<|end|>")))
    (warning,) = looked_at(tmp_path).warnings
    assert warning.message == "the chat template ends a reply with `<|end|>`, at which no response ends"
    assert warning.given == "end tokens: `<|im_end|>`"
    assert warning.hint == "write eos_token_id: [96, 98] into the model's generation_config.json"
    save(tmp_path, tokenizer(template=CHAT.replace("<|im_end|>", "<|end|>")), ends=[96, 98])
    assert looked_at(tmp_path) == Findings()


def test_an_end_of_turn_that_is_no_special_token_is_a_warning_too(tmp_path: Path) -> None:
    made = tokenizer(template=CHAT.replace("<|im_end|>", "[/turn]"))
    made.add_tokens(["[/turn]"])
    save(tmp_path, made)
    (warning,) = looked_at(tmp_path).warnings
    assert warning.message == "the chat template ends a reply with `[/turn]`, at which no response ends"


def test_an_answer_inside_the_prompt_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, tokenizer())
    asked = {"role": "user", "content": "1+1"}
    told: dict[str, Any] = {"answer": "2"}
    for kind, role in (("chat", "assistant"), ("template", "assistant"), ("chat", "Assistant"), ("template", "bot")):
        told["prompt"] = [asked, {"role": role, "content": "2"}]
        (warning,) = looked_at(tmp_path, QUESTION, told, kind=kind).warnings
        assert warning.message == "1 of the first 2 problems of `d` end with a message of the assistant"
        assert (warning.path, warning.given) == (("data", "train", 0, "columns", "prompt"), "d.jsonl, line 2")
    assert looked_at(tmp_path, {**told, "prompt": [*told["prompt"], asked]}) == Findings()


@pytest.mark.more
@pytest.mark.parametrize(
    ("answer", "reward", "doubt"),
    [
        ("72.0", "exact_match", "floats"),
        ("72.0", "math_dapo", "floats"),
        ("nan", "exact_match", "missing"),
        (True, "exact_match", "booleans"),
        ('["34"]', "math_dapo", "lists in JSON"),
        ("[34]", "math_dapo", "lists in JSON"),
        ("['34']", "math_dapo", "lists of texts"),
        ("['34']", "math_verify", "lists of texts"),
        ("so 34 #### 34", "math_verify", "solution"),
        ("None", "math_verify", "missing"),
        ("N/A", "exact_match", "missing"),
    ],
)
def test_a_gold_answer_that_few_responses_match_is_a_warning(
    answer: Any, reward: str, doubt: str, tmp_path: Path
) -> None:
    save(tmp_path, tokenizer())
    (warning,) = looked_at(tmp_path, QUESTION, {"prompt": "2+2", "answer": answer}, reward=reward).warnings
    assert doubt in warning.message
    assert warning.given == f"`{answer}`, in d.jsonl, line 2"


@pytest.mark.parametrize(("answer", "reward"), [("72", "math_dapo"), (72.0, "exact_match"), ("[1, 2]", "exact_match")])
def test_a_plain_answer_is_no_finding(answer: Any, reward: str, tmp_path: Path) -> None:
    save(tmp_path, tokenizer())
    assert looked_at(tmp_path, {"prompt": "2+2", "answer": answer}, reward=reward) == Findings()


def test_a_turn_may_end_with_any_end_token_of_the_model(tmp_path: Path) -> None:
    """The tokenizer names the end of a document, the generation config the end of a turn, or the other way round."""
    made = tokenizer(end="<|end|>")
    turn = made.convert_tokens_to_ids("<|im_end|>")
    save(tmp_path, made, ends=[turn])
    read = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert sorted(end_texts(read)) == ["<|end|>", "<|im_end|>"]
    around = ("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    assert around_words(read) == around
    save(tmp_path, tokenizer(), ends=[made.eos_token_id])
    assert around_words(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == around
    save(tmp_path, made, ends=[made.eos_token_id])
    with pytest.raises(SpecError, match="does not end a turn with an end token"):
        around_words(PreTrainedTokenizerFast.from_pretrained(tmp_path))


def test_a_warm_up_teaches_the_end_token_of_a_model_whose_tokenizer_has_none(tmp_path: Path) -> None:
    made = tokenizer(end=None)
    model = save(tmp_path, made, ends=[97, 96])
    assert end_token(model, made) == 97
    assert end_token(model, tokenizer()) == 96
    model.generation_config = GenerationConfig()
    model.config.eos_token_id = None
    with pytest.raises(SpecError, match="teaches an end token"):
        end_token(model, made)
