"""The beginning of a reply that a template writes itself reaches the scorers; an empty thought does not."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rpg.base.tokenization import make_tokenizer
from rpg.data.loading import encode_prompts
from rpg.data.prefill import Prefills
from rpg.rewards.functions.exact_match import ExactMatch
from rpg.rewards.score import Score, verdict
from rpg.rollouters.scoring import Scoring
from rpg.types import Problem, Rollout, Turn
from specs.schema.data import Data
from specs.schema.model import ByteTokenizer

HISTORY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n"
TEMPLATES = {
    "plain": (HISTORY + BEGIN + "{% endif %}", ""),
    "think": (HISTORY + BEGIN + "<think>\n{% endif %}", "<think>\n"),
    "reasoning": (HISTORY + BEGIN + "<reasoning>{% endif %}", "<reasoning>"),
    "an empty thought": (HISTORY + BEGIN + "<think>\n\n</think>\n\n{% endif %}", ""),
    "words": (HISTORY + BEGIN + "Answer: {% endif %}", "Answer: "),
    "other roles": (HISTORY + "{% if add_generation_prompt %}<|im_start|>model\n<think>{% endif %}", ""),
    # As Qwen3's thinking models: the last reply has a thought, an earlier one has none.
    "thoughts in the last reply": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
        "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + BEGIN + "<think>\n{% endif %}",
        "<think>\n",
    ),
    "no conversations": (
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
        + HISTORY
        + BEGIN
        + "<think>{% endif %}",
        "",
    ),
}


def tokenizer(template: str) -> Any:
    made = make_tokenizer(ByteTokenizer(), ())
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prefill_is_what_the_template_writes_behind_the_header_of_a_reply(name: str) -> None:
    template, prefill = TEMPLATES[name]
    policy = tokenizer(template)
    said = "the header <|im_start|>assistant\n is in the question too"
    prompt = policy.apply_chat_template([{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True)
    assert Prefills(policy).of(prompt) == prefill


class Heard:
    """A scorer that keeps the responses."""

    def __init__(self) -> None:
        self.responses: list[str] = []

    def submit(self, _problem: Problem, response: str, _member: Any = None) -> Future[Score]:
        self.responses.append(response)
        scored: Future[Score] = Future()
        scored.set_result(Score.of(0.0, None))
        return scored


def heard(policy: Any, *turns: tuple[str, bool]) -> tuple[str, str]:
    """The text that is scored and the one that is recorded, of turns that were sampled or not."""
    scorer: Any = Heard()
    problem = Problem("p", "?", "42", "d", prefill="<think>\n")
    scoring = Scoring(policy, scorer, [problem], group_size=1, reward_at=lambda _: None)  # type: ignore[arg-type]
    said = [(tuple(policy.encode(text, add_special_tokens=False)), sampled) for text, sampled in turns]
    made = tuple(Turn(ids, (0.0,) * len(ids) if sampled else None) for ids, sampled in said)
    scoring.begin(0, Rollout(made, "stop"))
    return scorer.responses[0], scoring.texts()[0]


def test_a_scorer_sees_the_prefill_and_the_record_does_not() -> None:
    policy = tokenizer(TEMPLATES["think"][0])
    assert heard(policy, ("so</think>42", True)) == ("<think>\nso</think>42", "so</think>42")
    again = ("<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n<think>\n", False)
    assert heard(policy, ("41", True), again, ("hm</think>42", True))[0] == "<think>\nhm</think>42"
    assert heard(policy, ("41", True), ("(41)", False), ("42", True))[0] == "42"


def test_an_exact_match_compares_what_the_policy_said() -> None:
    problem = Problem("p", "?", "42", "d", prefill="Answer: ")
    assert verdict(ExactMatch(type="exact_match"), problem, "Answer: 42").value == 1


def test_a_text_that_begins_with_the_token_of_beginnings_gets_no_second_one() -> None:
    from tokenizers.processors import TemplateProcessing

    policy = make_tokenizer(ByteTokenizer(), ())
    policy.add_special_tokens({"bos_token": "<s>"})
    begin = policy.bos_token_id
    policy.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    data = Data.model_validate({"train": ({"source": "jsonl", "path": "t.jsonl"},)})
    one, two, three = encode_prompts(policy, ["1+1", "<s>1+1", "<s><s>1+1"], data)
    assert one == two
    assert (one.count(begin), three.count(begin)) == (1, 2)
    assert json.dumps(encode_prompts(make_tokenizer(ByteTokenizer(), ()), ["1+1"], data))  # it has no such token


def test_a_prompt_that_was_loaded_has_its_prefill(tmp_path: Path) -> None:
    from rpg.data.loading import load_problems
    from rpg.data.staging import stage

    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    source = {"source": "jsonl", "path": str(tmp_path / "t.jsonl"), "columns": {"answer": "answer"}}
    data = Data.model_validate({"train": (source,), "prompt": {"type": "chat"}})
    stage(data, tmp_path)
    (problem,) = load_problems(tmp_path, "train", tokenizer(TEMPLATES["think"][0]), data)
    assert problem.prefill == "<think>\n"
    assert problem.prompt.endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("template", "prefill"),
    [
        ("User: {prompt}\nAssistant: <think>\n", "<think>\n"),
        ("{prompt}<reasoning>", "<reasoning>"),
        ("{prompt}", ""),
        ("{prompt}\n</think>", ""),
    ],
)
def test_a_template_of_plain_text_may_begin_a_thought(tmp_path: Path, template: str, prefill: str) -> None:
    (problem,) = loaded(tmp_path, template, "1 + 1? Write <p> before <b>")
    assert problem.prefill == prefill


def test_a_thought_that_a_prompt_of_plain_text_begins_and_no_response_ends_is_not_scored(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, "{prompt}", "1 + 1? <think>")
    reward = ExactMatch(type="exact_match", strip_thinking=True)
    assert problem.prefill == "<think>"
    assert verdict(reward, problem, problem.prefill + "2").extracted is None
    assert verdict(reward, problem, problem.prefill + "1 and 1</think>2").extracted == "2"


def loaded(directory: Path, template: str, prompt: str) -> list[Problem]:
    """The problems of a set of one row, whose prompts are plain text."""
    from rpg.data.loading import load_problems
    from rpg.data.staging import stage

    (directory / "t.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    source = {"source": "jsonl", "path": str(directory / "t.jsonl"), "columns": {"answer": "answer"}}
    data = Data.model_validate({"train": (source,), "prompt": {"type": "template", "template": template}})
    stage(data, directory)
    return load_problems(directory, "train", make_tokenizer(ByteTokenizer(), ()), data)
