"""Nothing that somebody wrote becomes a control token, and honest text has the tokens that it always had."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from rpg.base.tokenization import make_tokenizer
from rpg.data.plain_text import conversation_ids, plain_ids, rendered_ids, spelled
from rpg.rewards.judges.prompts import harmless
from rpg.rollouters.chat import ChatTokens, Message
from rpg.scoring_model import _Tokens
from rpg.tools.calls import answer_ids
from specs.schema.model import ByteTokenizer

SPECIAL = ["[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<extra_id_1>", "</s>"]
UNMARKED = ["<think>", "</think>", "<tool_call>", "<tool_response>"]
"""Control tokens that their tokenizers do not mark as special."""
ORDINARY = ["gradient", "    "]
"""Added tokens that control nothing."""
CORPUS = ["the gradient of a sum is the sum of gradients, and 12 + 34 = 46", "<a> [b] {c} | d\n\nassistant user system"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
TRIMMED = (
    "{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content | trim }}"
    "{% else %}[INST]{{ message.content | trim }}[/INST]{% endif %}{% endfor %}"
)


def fast(model: Tokenizer, special: list[str] = SPECIAL, **named: Any) -> PreTrainedTokenizerFast:
    model.add_tokens([AddedToken(each, special=False, normalized=False) for each in (*UNMARKED, *ORDINARY)])
    model.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    made = PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False, **named)
    made.chat_template = CHATML
    return made


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer as GPT-2 and Qwen have."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return fast(model, eos_token="<|im_end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama has, with a token before each text."""
    model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=500, special_tokens=pieces))
    parts = json.loads(model.to_str())
    model = Tokenizer.from_str(json.dumps(parts | {"added_tokens": parts["added_tokens"][:2]}))  # pieces are no tokens
    model.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return fast(model, [*SPECIAL, "<s>"], bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> PreTrainedTokenizerFast:
    """A tokenizer as T5 has: the vocabulary has the control tokens too, with the best scores."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("\u2581", -2.0), *((character, -4.0) for character in sorted(set("".join(CORPUS)) - {" "}))]
    pieces += [("\u2581the", -3.0), ("sum", -3.0), ("<extra_id_1>", 0.0), ("[TOOL_CALLS]", 0.0)]
    model = Tokenizer(models.Unigram(pieces, unk_id=2))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    return fast(model, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def word_piece() -> PreTrainedTokenizerFast:
    """A tokenizer as BERT has: letters become small, and a control token is found in such text."""
    pieces = ["[UNK]", "[CLS]", *sorted({each for each in "".join(CORPUS).lower() if each.strip()})]
    pieces += [f"##{piece}" for piece in pieces[2:]]
    model = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    model.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    model.post_processor = processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    return fast(model, [*SPECIAL, "[CLS]"], unk_token="[UNK]", cls_token="[CLS]", eos_token="<|im_end|>")


def only_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer that is made here from nothing."""
    made = make_tokenizer(ByteTokenizer(), ())
    made.chat_template = CHATML
    return made


KINDS = [byte_level, byte_fallback, unigram, word_piece, only_bytes]
KINDS = [cache(kind) for kind in KINDS]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
CONTROLS = [*SPECIAL, *UNMARKED, "<s>", "[CLS]", "<end>", "<END>", "\uff1cend\uff1e", "<pad>", "<|endoftext|>"]
HONEST = st.text("the gradient ofsum12+=\n.,'<[|{}\u00e9\u4e2d\U0001f600", max_size=60)
WRITTEN = st.lists(st.sampled_from([*CONTROLS, *ORDINARY]) | HONEST, max_size=6).map("".join)


def controls(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids of the control tokens that are spelled above."""
    spelled_out = {*CONTROLS} | {*map(str.lower, CONTROLS)}
    return {token for token, each in tokenizer.added_tokens_decoder.items() if each.content in spelled_out}


def spells(tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    return not controls(tokenizer).isdisjoint(tokenizer.encode(text, add_special_tokens=False))


@every_kind
@settings(max_examples=60, deadline=None)
@given(text=WRITTEN)
@example(text="".join(CONTROLS))
@example(text="<<|im_end|>|im_end|>[[INST]INST]<extra_id_1>\uff1cEND\uff1e")
def test_no_text_becomes_a_control_token(kind: Callable[[], PreTrainedTokenizerFast], text: str) -> None:
    tokenizer = kind()
    ids = plain_ids(tokenizer, text)
    assert controls(tokenizer).isdisjoint(ids)
    assert ids or not text.strip()
    if kind.__name__ in ("byte_level", "only_bytes"):
        assert tokenizer.decode(ids) == text
    assert not spells(tokenizer, spelled(tokenizer, text))


@every_kind
@settings(max_examples=60, deadline=None)
@given(text=HONEST | st.sampled_from(["a gradient", "    b", "<a> [b]", "\u2581", ""]))
def test_honest_text_has_the_tokens_that_it_always_had(kind: Callable[[], PreTrainedTokenizerFast], text: str) -> None:
    tokenizer = kind()
    if not spells(tokenizer, text):
        assert plain_ids(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
        assert spelled(tokenizer, text) == text


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], _Tokens]:
    """Tokens of a local judge, for each kind of tokenizer and each template."""
    made = {}
    for kind in KINDS:
        for name, template in (("chatml", CHATML), ("trimmed", TRIMMED), ("none", None)):
            directory = tmp_path_factory.mktemp("model")
            LlamaConfig().save_pretrained(directory)
            tokenizer = kind()
            tokenizer.chat_template = template
            tokenizer.save_pretrained(directory)
            tokenizer.chat_template = CHATML
            made[kind.__name__, name] = _Tokens(directory, 0)
    return made


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Judge the sum."}, {"role": "user", "content": f"{question}\n{answer}"}]


def as_ever(tokens: _Tokens, messages: list[dict[str, str]], prefix: str | None) -> list[int]:
    """Tokens of the whole conversation as one text, as transformers has them."""
    tokenizer, asks = tokens.tokenizer, prefix is not None
    if not tokenizer.chat_template:
        text = "\n\n".join(message["content"] for message in messages) + ("\n" if asks else "")
        return cast("list[int]", tokenizer(text + (prefix or ""))["input_ids"])
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))
    return cast("list[int]", tokenizer(text + (prefix or ""), add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("template", ["chatml", "trimmed", "none"])
@every_kind
@settings(max_examples=25, deadline=None)
@given(answer=HONEST, prefix=st.sampled_from([None, "", "Verdict: "]))
@example(answer="\n  \n", prefix=None)
def test_an_honest_answer_has_the_tokens_of_the_whole_conversation(
    kind: Callable[[], PreTrainedTokenizerFast],
    template: str,
    scoring: dict[tuple[str, str], _Tokens],
    answer: str,
    prefix: str | None,
) -> None:
    tokens = scoring[kind.__name__, template]
    messages = conversation("the sum of 1 and 2?", answer)
    if not spells(tokens.tokenizer, answer):
        assert tokens.of(messages, prefix=prefix) == as_ever(tokens, messages, prefix)


@pytest.mark.parametrize("template", ["chatml", "trimmed", "none"])
@every_kind
@settings(max_examples=25, deadline=None)
@given(answer=WRITTEN)
@example(answer="".join(CONTROLS))
@example(answer="|im_end|>")
def test_what_is_judged_adds_no_control_token_to_those_of_the_template(
    kind: Callable[[], PreTrainedTokenizerFast],
    template: str,
    scoring: dict[tuple[str, str], _Tokens],
    answer: str,
) -> None:
    tokens = scoring[kind.__name__, template]
    known = controls(tokens.tokenizer)

    def among(text: str) -> list[int]:
        return [token for token in tokens.of(conversation("?", text), prefix="") if token in known]

    assert among(answer) == among("an honest answer")


@pytest.mark.parametrize("text", ["<END>", "a <End> b", "\uff1cend\uff1e", "<|im_end|><eNd>"])
def test_what_a_tokenizer_makes_a_control_token_of_in_an_own_spelling_has_spaces(text: str) -> None:
    tokenizer = word_piece()
    assert spells(tokenizer, text)
    written = spelled(tokenizer, {text: [text, "honest"]})
    assert not spells(tokenizer, json.dumps(written, ensure_ascii=False))
    ((name, (value, honest)),) = written.items()
    assert name == value
    assert value.replace(" ", "") == text.replace(" ", "")
    assert honest == "honest"


def test_a_character_that_is_a_control_token_is_left_out() -> None:
    tokenizer = word_piece()
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u00a7", AddedToken("\u2020", normalized=True)]})
    assert not spells(tokenizer, "a")
    for text in ("a\u00a7b", "\u2020", "\u00a7<END>"):
        written = spelled(tokenizer, text)
        assert not {"\u00a7", "\u2020"} & {*written}


def test_a_text_that_completes_a_control_token_of_the_template_is_encoded_by_itself() -> None:
    tokenizer = byte_level()
    begun = conversation_ids(tokenizer, ["|im_end|>b"], lambda said: f"<{said[0]}")
    assert controls(tokenizer).isdisjoint(begun)
    assert tokenizer.decode(begun) == "<|im_end|>b"
    assert rendered_ids(tokenizer, "<|im_end|>", []) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("text", CONTROLS[:8])
def test_what_an_agent_writes_in_any_part_of_a_message_controls_nothing(text: str) -> None:
    tokenizer = byte_level()
    chat = ChatTokens(tokenizer, None)
    known = controls(tokenizer)

    def asked(said: str) -> tuple[list[Message], list[Any]]:
        call = {"name": f"f{said}", "arguments": {f"a{said}": [said, {"b": said}]}}
        messages: list[Message] = [
            {"role": f"user{said}", "content": f"content{said}"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": said, "type": "function", "function": call}]},
            {"role": "tool", "content": said, "tool_call_id": said, "name": said},
        ]
        return messages, [{"type": "function", "function": {"name": f"f{said}", "description": said}}]

    def among(said: str) -> list[int]:
        return [token for token in chat.whole(*asked(said)) if token in known]

    assert among(text) == among("honest") == among(f"\ue0000\ue001{text}")
    later = chat.behind(asked(text)[0], 1, [], last=tokenizer.eos_token_id)
    honest = chat.behind(asked("honest")[0], 1, [], last=tokenizer.eos_token_id)
    assert [token for token in later if token in known] == [token for token in honest if token in known]


@pytest.mark.parametrize("text", CONTROLS[:12])
def test_what_a_tool_or_a_user_says_controls_nothing(text: str) -> None:
    tokenizer = byte_level()
    before, after = "<tool_response>", "<|im_end|>"
    first, *said, last = answer_ids(tokenizer, f"1{text}2", (before, after), most=100)
    assert [first, last] == tokenizer.convert_tokens_to_ids([before, after])
    assert controls(tokenizer).isdisjoint(said)
    assert tokenizer.decode(said) == f"1{text}2"


@pytest.mark.parametrize(
    "text", [each for each in SPECIAL if each != "</s>"] + UNMARKED + ["</s>", "<pad>", "<unused7>"]
)
def test_a_judge_behind_an_address_is_sent_no_control_token(text: str) -> None:
    assert harmless(f"a{text}b") == f"a{text[0]} {text[1:]}b"


def test_honest_text_is_sent_as_it_is() -> None:
    honest = "x < 3, a[INDEX], List<String>, <b>bold</b>, [OK], [x for x in y], 1 <2> 3, <thinking>"
    assert harmless(honest) == honest


def test_a_tokenizer_of_many_control_tokens_is_asked_soon() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<unused{number}>" for number in range(6000)]})
    text = json.dumps({"a": ["x < y"] * 2000}) + "<unused5999>"
    assert spelled(tokenizer, text).endswith("< unused5999>")
    assert controls(tokenizer).isdisjoint(plain_ids(tokenizer, text))
