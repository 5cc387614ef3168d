"""An agent: it asks a model for a product, computes the model's calls, and asks again."""

import re
from functools import cache
from typing import Any

from openai import OpenAI


def solve(problem: Any, base_url: str, api_key: str) -> None:
    """Asks `37*48=`. If the model writes `[37*48]`, the agent answers `(1776)` and the model writes the result."""
    model = _client(base_url).with_options(api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    said = _asked(model, messages)
    if call := re.fullmatch(r"\[(\d+)\*(\d+)\]", said):
        product = int(call[1]) * int(call[2])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"({product})"}]
        _asked(model, messages)


def _asked(model: OpenAI, messages: list[Any]) -> str:
    answer = model.chat.completions.create(model="any", messages=messages, max_completion_tokens=7)
    return answer.choices[0].message.content or ""


@cache
def _client(base_url: str) -> OpenAI:
    """A client that all threads share: to make one takes longer than to ask."""
    return OpenAI(base_url=base_url, api_key="of each response", timeout=600)
