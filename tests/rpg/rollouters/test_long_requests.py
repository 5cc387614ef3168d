"""What an agent or a tool sends is bounded before it is parsed or tokenized."""

import json
import urllib.error
import urllib.request

import pytest

from rpg.base.tokenization import make_tokenizer
from rpg.rollouters.chat import read_request
from rpg.rollouters.endpoint import endpoint
from rpg.tools.calls import answer_ids, read_calls
from specs.schema.model import ByteTokenizer

BYTES = make_tokenizer(ByteTokenizer(), ())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"messages": ' + b"[" * 200_000, "nested too deeply"),
        (b"[" + b"[]," * 4_000_000 + b"0]", "at most 8 MiB"),
        (b"9" * 5000, "a whole number of 5000 digits"),
    ],
    ids=["brackets", "messages", "16 MiB", "digits"],
)
def test_a_request_that_nobody_can_parse_is_answered_as_a_wrong_one(body: bytes, words: str) -> None:
    at = endpoint()
    line = at.open()
    headers = {"Authorization": f"Bearer {line.key}"}
    request = urllib.request.Request(f"{at.base_url}/chat/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    at.close(line, "over")
    assert refused.value.code == 400
    assert words in refused.value.read().decode()


@pytest.mark.parametrize("arguments", ["[" * 200_000, "9" * 5000, "{"])
def test_arguments_of_a_call_that_nobody_can_parse_stay_a_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "?"}]
    assert read_request({"messages": asked}).messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("text", ["[" * 200_000, json.dumps({"name": "f", "arguments": 1}), "9" * 5000])
def test_a_call_that_nobody_can_parse_is_an_error_of_the_policy(text: str) -> None:
    (call,) = read_calls(f"<tool_call>{text}</tool_call>")
    assert call.error


def test_of_a_tools_answer_no_more_is_tokenized_than_is_shown() -> None:
    class Counting:
        """A tokenizer that counts the characters that it is given."""

        seen = 0

        def __getattr__(self, name: str) -> object:
            return getattr(BYTES, name)

        def encode(self, text: str, **options: object) -> list[int]:
            self.seen += len(text)
            ids: list[int] = BYTES.encode(text, **options)
            return ids

    counting = Counting()
    answer = "0123456789" * 100_000
    assert answer_ids(counting, answer, ("<", ">"), most=8) == answer_ids(BYTES, answer[:20], ("<", ">"), most=8)
    assert counting.seen < 10_000
