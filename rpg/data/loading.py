"""Loads published problems for a model: renders chat prompts and filters long ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from rpg.data import metadata
from rpg.data.chat_template import TemplateError, render_all, stop_clock
from rpg.data.prefill import Prefills, begun
from rpg.types import Problem
from specs import errors
from specs.schema.data import ChatPrompt, Data

Tools = Sequence[dict[str, Any]]
"""Descriptions of tools, as `Tool.describe` returns them."""


def load_problems(
    data_dir: Path, split: Literal["train", "evaluation"], tokenizer: Any, data: Data, tools: Tools = ()
) -> list[Problem]:
    """Returns the problems of a split, with prompts as the model sees them, tools shown by the chat template included.

    Training problems whose prompt exceeds `data.max_prompt_length` tokens are left out. Such an evaluation problem, or
    a training split with no problem left, raises SpecError. `tokenizer` is a tokenizer of transformers.
    """
    stop_clock(data_dir)
    rows = pq.read_table(data_dir / f"{split}.parquet").to_pylist()
    prefills = Prefills(tokenizer, **_options(data.prompt, tools)) if isinstance(data.prompt, ChatPrompt) else None
    sources = _sources(data_dir, split) if any(source.reward for source in (*data.train, *data.evaluation)) else []
    problems = [
        Problem(
            row["problem_id"],
            prompt,
            row["answer"],
            row["dataset"],
            metadata.load(row["metadata"]),
            row.get("cluster", ""),
            source,
            row["prompt"] if isinstance(data.prompt, ChatPrompt) else "",
            tuple(row.get("shown") or ()),
            prefills.of(prompt) if prefills else begun(data.prompt.template, prompt),
        )
        for row, prompt, source in zip(
            rows,
            rendered([row["prompt"] for row in rows], tokenizer, data, tools),
            sources or [""] * len(rows),
            strict=True,
        )
    ]
    lengths = [len(ids) for ids in encode_prompts(tokenizer, [problem.prompt for problem in problems], data)]
    fitting = [p for p, length in zip(problems, lengths, strict=True) if length <= data.max_prompt_length]
    if len(fitting) < len(problems) and (split == "evaluation" or not fitting):
        raise _too_long(split, problems, lengths, data)
    return fitting


def _sources(data_dir: Path, split: str) -> list[str]:
    """Returns the spec path of each row's set. The sets follow one another."""
    sets = json.loads((data_dir / "summary.json").read_text(encoding="utf-8"))[split]["sets"]
    return [each["source"] for each in sets for _ in range(each["problems"])]


def encode_prompts(tokenizer: Any, prompts: Sequence[str], data: Data) -> list[list[int]]:
    """Returns the token ids of rendered prompts. Adds special tokens unless a chat template has already written them.

    A text that begins with the BOS token gets no second one.
    """
    if not prompts:
        return []
    encoded: list[list[int]] = tokenizer(list(prompts), add_special_tokens=not isinstance(data.prompt, ChatPrompt))[
        "input_ids"
    ]
    begin = tokenizer.bos_token_id
    return [ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids for ids in encoded]


def _options(prompt: ChatPrompt, tools: Tools) -> dict[str, Any]:
    """Returns the arguments of the chat template other than messages."""
    thinking = {} if prompt.enable_thinking == "unset" else {"enable_thinking": prompt.enable_thinking}
    return {**({"tools": list(tools)} if tools else {}), **thinking}


def rendered(prompts: list[str], tokenizer: Any, data: Data, tools: Tools = ()) -> list[str]:
    """Returns staged prompts as the model sees them.

    Raises:
        SpecError: the prompts are messages and the tokenizer accepts none, its template fails on them or makes one
            text of all of them, or it does not show tools that must be shown.
    """
    if not isinstance(data.prompt, ChatPrompt):
        if tools:
            raise _no_tools("the prompts are plain text", "write data.prompt.type: chat, or format: tags")
        return prompts
    if not tokenizer.chat_template:
        raise errors.SpecError(
            errors.Issue(
                "the model's tokenizer has no chat template",
                path=("data", "prompt", "type"),
                given="chat",
                hint="write `type: template`, a `chat_template`, or take a model that was tuned for chat",
            )
        )
    try:
        texts = render_all(tokenizer, prompts, **_options(data.prompt, tools))
        _check_texts(prompts, texts)
    except TemplateError as error:
        hint = "write a data.prompt.chat_template that renders these messages, or data.prompt.type: template"
        raise errors.SpecError(errors.Issue(str(error), path=("data", "prompt"), hint=hint)) from None
    names = [tool["function"]["name"] for tool in tools]
    if unseen := [name for name in names if any(name not in text for text in texts[:1])]:
        raise _no_tools(f"the model's chat template does not show {', '.join(unseen)}", "write format: tags")
    return texts


def _check_texts(prompts: Sequence[str], texts: Sequence[str]) -> None:
    """Raises TemplateError if a template renders different prompts as the same text, or half a character."""
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateError(f"the chat template writes half a character into prompt {number}") from None
    if len(set(prompts)) > 1 and len(set(texts)) == 1:
        raise TemplateError(
            "the chat template leaves out the messages: it renders all prompts as the same text"
            f" {texts[0][:80]!r}; it may expect a content that is a list of parts"
        )


def _no_tools(why: str, hint: str) -> errors.SpecError:
    path = ("rollout", "rollouter", "format")
    return errors.SpecError(
        errors.Issue("the prompt would not describe the policy's tools", path, given=why, hint=hint)
    )


def _too_long(split: str, problems: list[Problem], lengths: list[int], data: Data) -> errors.SpecError:
    longest = max(range(len(problems)), key=lengths.__getitem__)
    count = sum(length > data.max_prompt_length for length in lengths)
    which = "every training prompt is" if split == "train" else f"{count} of {len(problems)} evaluation prompts are"
    return errors.SpecError(
        errors.Issue(
            f"{which} longer than max_prompt_length; the longest has {lengths[longest]} tokens",
            path=("data", "max_prompt_length"),
            given=str(data.max_prompt_length),
            allowed=f"at least {lengths[longest] if split == 'evaluation' else min(lengths)}",
        )
    )
