"""Agents for the tests, written against the `openai` package."""

from typing import Any

from openai import OpenAI

from rpg.rollouters import Problem


def second_thoughts(problem: Problem, base_url: str, api_key: str) -> None:
    """Asks twice. What follows an answer with a 1 is asked without what was said before."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        first = client.chat.completions.create(model="any", messages=messages).choices[0].message
        anew = "1" in (first.content or "")
        messages = (
            [{"role": "user", "content": "01="}] if anew else [*messages, first, {"role": "user", "content": "0="}]
        )
        client.chat.completions.create(model="any", messages=messages, stream=True).close()


def silent(problem: Problem, *_: str) -> str:
    """Asks nothing."""
    return problem.answer
