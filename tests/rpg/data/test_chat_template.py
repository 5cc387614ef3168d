"""Chat templates that loop, take all memory or raise: each is reported in seconds, and named at its key."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import COMMAND, SPEC

from rpg.base.tokenization import make_tokenizer
from rpg.data import chat_template
from rpg.data.chat_template import TemplateError, render, render_all
from rpg.data.prefill import Prefills
from specs.machine.foreign.limited import LimitError, in_limited_process, limited_memory
from specs.schema.model import ByteTokenizer

HELLO = [{"role": "user", "content": "hello"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
BOMBS = {
    "loops": (LOOPS, "took longer than"),
    "multiplies": (
        "{{ 9 ** (9 ** 9) }}",
        "took longer than|OverflowError|MemoryError|too much memory|MiB of memory",
    ),
    "takes memory": ("{{ 'a' * 10 ** 11 }}", "MiB of memory"),
    "doubles": (DOUBLES, "took longer than|MiB of memory"),
    "reaches for attributes": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "raises": ("{{ raise_exception('no system message') }}", "no system message"),
    "divides": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "is no template": ("{% for %}", "TemplateSyntaxError"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 3.0)
    return make_tokenizer(ByteTokenizer(type="bytes"), ())


@pytest.mark.more
@pytest.mark.parametrize("kind", BOMBS)
def test_a_template_that_fails_is_named_within_its_limits(tokenizer: Any, kind: str) -> None:
    tokenizer.chat_template, why = BOMBS[kind]
    before = time.monotonic()
    with pytest.raises(TemplateError, match=f"the chat template fails on prompt 1: .*({why})"):
        render_all(tokenizer, [json.dumps(HELLO)])
    assert time.monotonic() - before < 30


def test_the_prompt_on_which_a_template_fails_is_counted_and_those_before_it_take_no_part(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}{% if messages[0].content == 'b' %}" + LOOPS + "{% endif %}"
    prompts = [json.dumps([{"role": "user", "content": content}]) for content in ("\ud800é", "b", "c")]
    assert render_all(tokenizer, [*prompts[::2], *prompts[::2]]) == ["\ud800é", "c"] * 2
    with pytest.raises(TemplateError, match=r"on prompt 2: took longer than 3 s"):
        render_all(tokenizer, prompts)


@pytest.mark.more
def test_a_template_that_is_slow_on_each_prompt_ends_in_the_time_of_all(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = (
        "{% for a in range(20) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 60.0)
    monkeypatch.setattr(chat_template, "_MOST_SECONDS_OF_ALL", 1.0)
    before = time.monotonic()
    with pytest.raises(TemplateError, match=r"on prompt [0-9]+: took longer than 3 s in all"):
        render_all(tokenizer, [json.dumps(HELLO)] * 100)
    assert time.monotonic() - before < 10
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert render_all(tokenizer, [json.dumps(HELLO)] * 100) == ["hello"] * 100


@pytest.mark.parametrize(("seconds", "total", "limit"), [(1.0, 60.0, "1 s"), (60.0, 1.0, "1 s in all")])
def test_the_limit_that_was_passed_is_named(seconds: float, total: float, limit: str) -> None:
    def waits() -> Iterator[str]:
        yield "first"
        time.sleep(60)

    given = in_limited_process(waits, seconds=seconds, memory=1 << 30, total=total)
    assert next(given) == "first"
    with pytest.raises(LimitError, match=f"^took longer than {limit}$"):
        next(given)


def test_a_loop_in_a_turn_of_a_conversation_is_interrupted(tokenizer: Any) -> None:
    tokenizer.chat_template = LOOPS
    with pytest.raises(TemplateError, match="took longer than 3 s"):
        render(tokenizer, HELLO)
    tokenizer.chat_template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(TemplateError, match="SecurityError"):
        render(tokenizer, HELLO)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert render(tokenizer, HELLO) == "hello"


def test_a_calculation_in_an_earlier_reply_ends_in_its_time(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ 9 ** (9 ** 9) }}{% endif %}{{ messages[0].content }}"
    before = time.monotonic()
    assert Prefills(tokenizer).of("hello") == ""
    assert time.monotonic() - before < 15


def test_a_process_that_dies_is_an_error_and_leaves_no_child() -> None:
    def dies() -> Iterator[str]:
        yield str(os.getpid())
        os.kill(os.getpid(), 9)

    given = in_limited_process(dies, seconds=20, memory=1 << 30)
    child = int(next(given))
    assert child != os.getpid()
    with pytest.raises(LimitError, match="crashed"):
        next(given)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def test_a_limit_of_memory_ends_with_its_block() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited_memory(256 << 20), pytest.raises(MemoryError):
        bytearray(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(ByteTokenizer(type="bytes"), ())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.more
@pytest.mark.parametrize("kind", ["loops", "reaches for attributes"])
def test_validate_deep_ends_and_names_the_prompts_line(model: Path, tmp_path: Path, kind: str) -> None:
    template, why = BOMBS[kind]
    (model / "chat_template.jinja").write_text(template)
    head, _, rest = SPEC.partition("model:\n")
    text = head + f"model:\n  source: pretrained\n  path: {model}\n" + rest[rest.index("data:\n") :]
    text = text.replace('{type: template, template: "{metadata.expression} ="}', "{type: chat}")
    spec = tmp_path / "spec.yaml"
    spec.write_text(text)
    command = [sys.executable, "-c", COMMAND, "validate", "--deep", str(spec)]
    environment = os.environ | {"RPG_HOME": str(tmp_path / "home")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2, result.stderr
    line = next(number for number, line in enumerate(text.splitlines(), 1) if line.startswith("  prompt: "))
    first = result.stderr.splitlines()[0]
    assert first.startswith(f"{spec}:{line}: data.prompt: the chat template fails on prompt 1: "), result.stderr
    assert re.search(why, first)
    assert "Traceback" not in result.stderr
