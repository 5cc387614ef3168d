"""A response ends at any end token that a file of the model names."""

import json
from pathlib import Path

import pytest
from transformers import Mistral3Config

from rpg.pretrained import config_of, end_texts, special_tokens, tokenizer_of
from specs.errors import SpecError
from tests.rpg.tiny_engine import qwen3, save


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose tokenizer names <end>, with <pad> beside it."""
    save(qwen3(), tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return tmp_path


def write(path: Path, **values: object) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **values}))


def ids(directory: Path) -> tuple[int, int]:
    """The end token and the padding token of the directory's tokenizer."""
    tokens = special_tokens(directory)
    return tokens.eos_ids[0], tokens.pad_id


def test_a_document_ends_by_the_generation_config_and_a_turn_by_the_tokenizer(directory: Path) -> None:
    end, pad = ids(directory)
    write(directory / "generation_config.json", eos_token_id=pad)
    assert special_tokens(directory).eos_ids == (pad, end)


def test_a_list_of_end_tokens_keeps_its_order_and_has_each_once(directory: Path) -> None:
    end, pad = ids(directory)
    write(directory / "generation_config.json", eos_token_id=[5, end, pad])
    assert special_tokens(directory).eos_ids == (5, end, pad)


def test_the_configs_end_token_counts_where_it_is_a_special_token(directory: Path) -> None:
    end, pad = ids(directory)
    write(directory / "config.json", eos_token_id=pad)
    assert special_tokens(directory).eos_ids == (end, pad)
    write(directory / "config.json", eos_token_id=2)  # the default of a config's class, here a letter
    assert special_tokens(directory).eos_ids == (end,)


@pytest.mark.parametrize("no_token", [-1, [], [-1], None])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_setting_that_names_no_token_does_not_count(directory: Path, name: str, no_token: object) -> None:
    tokens, texts = special_tokens(directory), end_texts(tokenizer_of(directory))
    write(directory / name, eos_token_id=no_token, pad_token_id=-1)
    assert special_tokens(directory) == tokens
    assert end_texts(tokenizer_of(directory)) == texts


def test_the_end_tokens_beside_the_texts_config_count(directory: Path) -> None:
    (end, pad), text = ids(directory), config_of(directory).to_dict()
    config = Mistral3Config(text_config={**text, "model_type": "mistral"}, eos_token_id=[end, pad])
    assert special_tokens(directory, config=config).eos_ids == (end, pad)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_generation_config_that_cannot_be_read_is_refused_by_its_name(directory: Path, text: str) -> None:
    (directory / "generation_config.json").write_text(text)
    with pytest.raises(SpecError, match=r"model: generation_config\.json cannot be read"):
        special_tokens(directory)


def test_a_model_without_an_end_token_is_refused(directory: Path) -> None:
    write(directory / "tokenizer_config.json", eos_token=None)
    write(directory / "config.json", eos_token_id=None)
    with pytest.raises(SpecError, match="no end-of-text token"):
        special_tokens(directory)
