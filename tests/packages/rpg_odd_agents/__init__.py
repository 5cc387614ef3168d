"""Agents for the tests, written against the `openai` package."""

from functools import cache
from typing import Any

from openai import OpenAI

from rpg.rollouters import Problem


@cache
def client(base_url: str) -> OpenAI:
    """A client that all responses share: each takes a key of its own."""
    return OpenAI(base_url=base_url, api_key="none")


def second_thoughts(problem: Problem, base_url: str, api_key: str) -> None:
    """Asks twice. After an answer with a 1 it asks without the earlier messages."""
    policy = client(base_url).with_options(api_key=api_key).chat.completions
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    first = policy.create(model="any", messages=messages).choices[0].message
    anew = "1" in (first.content or "")
    messages = [{"role": "user", "content": "01="}] if anew else [*messages, first, {"role": "user", "content": "0="}]
    policy.create(model="any", messages=messages, stream=True).close()


def helpful(problem: Problem, base_url: str, api_key: str) -> str:
    """Computes the answer if the policy calls for it with a 1; else returns the policy's text."""
    policy = client(base_url).with_options(api_key=api_key).chat.completions
    said = policy.create(model="any", messages=[{"role": "user", "content": problem.prompt}]).choices[0].message.content
    return problem.prompt[0] if said and said.startswith("1") else said or ""


def silent(problem: Problem, *_: str) -> str:
    """Asks nothing."""
    return problem.prompt
