"""Published problems, ready for a model: chat prompts rendered, long ones filtered."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from rpg.data import metadata
from rpg.types import Problem
from specs import errors
from specs.schema.data import ChatPrompt, Data


def load_problems(data_dir: Path, split: Literal["train", "evaluation"], tokenizer: Any, data: Data) -> list[Problem]:
    """The problems of a split, their prompts as the model sees them.

    Training problems whose prompt has more than `data.max_prompt_length` tokens are left out; an evaluation problem
    that long, or no training problem left, is a SpecError. `tokenizer` is transformers'.
    """
    rows = pq.read_table(data_dir / f"{split}.parquet").to_pylist()
    problems = [
        Problem(
            row["problem_id"],
            prompt,
            row["answer"],
            row["dataset"],
            metadata.load(row["metadata"]),
            row.get("cluster", ""),
        )
        for row, prompt in zip(rows, rendered([row["prompt"] for row in rows], tokenizer, data), strict=True)
    ]
    lengths = [len(ids) for ids in encode_prompts(tokenizer, [problem.prompt for problem in problems], data)]
    fitting = [p for p, length in zip(problems, lengths, strict=True) if length <= data.max_prompt_length]
    if len(fitting) < len(problems) and (split == "evaluation" or not fitting):
        raise _too_long(split, problems, lengths, data)
    return fitting


def encode_prompts(tokenizer: Any, prompts: Sequence[str], data: Data) -> list[list[int]]:
    """Token ids of rendered prompts. Special tokens are added unless a chat template has written them already."""
    if not prompts:
        return []
    encoded: list[list[int]] = tokenizer(list(prompts), add_special_tokens=not isinstance(data.prompt, ChatPrompt))[
        "input_ids"
    ]
    return encoded


def rendered(prompts: list[str], tokenizer: Any, data: Data) -> list[str]:
    """Staged prompts as the model sees them. SpecError where they are messages and the tokenizer takes none."""
    if not isinstance(data.prompt, ChatPrompt):
        return prompts
    if not tokenizer.chat_template:
        raise errors.SpecError(
            errors.Issue(
                "the model's tokenizer has no chat template",
                path=("data", "prompt", "type"),
                given="chat",
                hint="write `type: template`, or take a model that was tuned for chat",
            )
        )
    thinking = data.prompt.enable_thinking
    arguments = {} if thinking == "unset" else {"enable_thinking": thinking}
    return [
        tokenizer.apply_chat_template(json.loads(prompt), tokenize=False, add_generation_prompt=True, **arguments)
        for prompt in prompts
    ]


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
