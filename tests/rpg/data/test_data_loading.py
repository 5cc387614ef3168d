"""Published problems as a model is asked them."""

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from rpg.base.tokenization import make_tokenizer
from rpg.data.chat_template import render
from rpg.data.loading import encode_prompts, load_problems
from rpg.data.staging import SCHEMA, stage
from rpg.evaluation.records import Answered, Evaluated, Recorder
from rpg.recording.segments import SegmentWriter
from rpg.rewards import Score
from specs.errors import Issue, SpecError
from specs.schema.data import ChatPrompt, Data
from specs.schema.evaluation import Evaluation
from specs.schema.model import ByteTokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant{{ ' thinks' if enable_thinking | default(true) }}>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(ByteTokenizer(), ())


def publish(directory: Path, split: str, *prompts: str) -> None:
    rows = [
        {"problem_id": f"id{i}", "prompt": prompt, "answer": str(i), "dataset": "d", "metadata": '{"n": 1}'}
        for i, prompt in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), directory / f"{split}.parquet")


def data(max_prompt_length: int = 10, prompt: ChatPrompt | None = None) -> Data:
    fields = {"train": ({"source": "jsonl", "path": "t.jsonl"},), "max_prompt_length": max_prompt_length}
    return Data.model_validate(fields | ({"prompt": prompt} if prompt else {}))


def test_long_training_prompts_are_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    publish(tmp_path, "train", "short", "much too long", "exactly 10")
    problems = load_problems(tmp_path, "train", tokenizer, data())
    assert [(p.problem_id, p.prompt, p.answer, p.dataset, p.metadata) for p in problems] == [
        ("id0", "short", "0", "d", {"n": 1}),
        ("id2", "exactly 10", "2", "d", {"n": 1}),
    ]


def test_a_long_evaluation_prompt_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    publish(tmp_path, "evaluation", "short", "much too long")
    with pytest.raises(SpecError) as caught:
        load_problems(tmp_path, "evaluation", tokenizer, data())
    assert caught.value.issues == (
        Issue(
            "1 of 2 evaluation prompts are longer than max_prompt_length; the longest has 13 tokens",
            path=("data", "max_prompt_length"),
            given="10",
            allowed="at least 13",
        ),
    )


def test_every_training_prompt_too_long_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    publish(tmp_path, "train", "much too long", "far too long")
    with pytest.raises(SpecError) as caught:
        load_problems(tmp_path, "train", tokenizer, data())
    (problem,) = caught.value.issues
    assert problem.message == ("every training prompt is longer than max_prompt_length; the longest has 13 tokens")
    assert problem.allowed == "at least 12"


def test_no_evaluation_problems_are_no_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    publish(tmp_path, "evaluation")
    assert load_problems(tmp_path, "evaluation", tokenizer, data()) == []


def test_chat_prompts_are_rendered_with_the_tokenizers_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATE
    publish(tmp_path, "train", '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]')
    plain = load_problems(tmp_path, "train", tokenizer, data(100, ChatPrompt()))
    assert plain[0].prompt == "<system>Be brief.<user>1+1<assistant>"
    thinking = load_problems(tmp_path, "train", tokenizer, data(100, ChatPrompt(enable_thinking=True)))
    assert thinking[0].prompt == "<system>Be brief.<user>1+1<assistant thinks>"
    own = load_problems(tmp_path, "train", tokenizer, data(100, ChatPrompt(enable_thinking="unset")))
    assert own[0].prompt == thinking[0].prompt, "the template's own default"


def test_chat_without_a_template_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    publish(tmp_path, "train", '[{"role": "user", "content": "1+1"}]')
    with pytest.raises(SpecError) as caught:
        load_problems(tmp_path, "train", tokenizer, data(100, ChatPrompt()))
    assert caught.value.issues == (
        Issue(
            "the model's tokenizer has no chat template",
            path=("data", "prompt", "type"),
            given="chat",
            hint="write `type: template`, a `chat_template`, or take a model that was tuned for chat",
        ),
    )


def test_special_tokens_are_added_to_plain_text_only(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, end)]
    )
    (plain,) = encode_prompts(tokenizer, ["a"], data())
    (chat,) = encode_prompts(tokenizer, ["a"], data(10, ChatPrompt()))
    assert plain == [end, *chat]


def test_the_cluster_of_a_problem_goes_from_its_column_through_the_stage_into_the_record(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"{n} + 1", "answer": n + 1, "theme": "even" if n % 2 else "odd"} for n in range(4)]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text('{"prompt": "9 + 9", "answer": 18}\n')
    common = {"source": "jsonl", "columns": {"answer": "answer"}}
    sets = Data.model_validate(
        {
            "train": [{**common, "path": str(tmp_path / "train.jsonl")}],
            "evaluation": [{**common, "path": str(tmp_path / "held-out.jsonl"), "cluster": "theme"}],
        }
    )
    stage(sets, tmp_path)
    assert pq.read_schema(tmp_path / "train.parquet").names == SCHEMA.names, "as it was before clusters had names"
    problems = load_problems(tmp_path, "evaluation", tokenizer, sets)
    assert [problem.cluster for problem in problems] == ["odd", "even", "odd", "even"]
    writer = SegmentWriter(tmp_path, "run", 1)
    recorder = Recorder(writer, Evaluation(samples_per_problem=1), "run", "f" * 64)
    answered = [[Answered(each, 0, "x", 1, "stop", Score(float(n < 2), n < 2))] for n, each in enumerate(problems)]
    (told,) = recorder.record(1, Evaluated(answered))
    writer.flush()
    (segment,) = (tmp_path / "segments/evaluation_samples").glob("*.parquet")
    assert pq.read_table(segment)["cluster"].to_pylist() == ["odd", "even", "odd", "even"]
    without = [[replace(each, problem=replace(each.problem, cluster=""))] for (each,) in answered]
    (alone,) = recorder.record(2, Evaluated(without))
    ends = [each["metrics"]["mean@1"]["ci_high"] - each["metrics"]["mean@1"]["ci_low"] for each in (told, alone)]
    assert ends[0] > ends[1]


def test_what_agents_are_given_goes_from_its_column_through_the_stage(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": f"{number}=", "answer": "gold", "level": number, "hint": "gold"} for number in range(2)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"answer": "answer", "keep": ["hint"], "shown": ["level"]}
    source = {"source": "jsonl", "path": str(tmp_path / "set.jsonl"), "columns": columns}
    spec = Data.model_validate({"train": [source]})
    stage(spec, tmp_path)
    problems = load_problems(tmp_path, "train", tokenizer, spec)
    assert [problem.metadata for problem in problems] == [{"hint": "gold", "level": number} for number in range(2)]
    assert [problem.public().metadata for problem in problems] == [{"level": 0}, {"level": 1}]


DATED = "{{ strftime_now('%d %b %Y') }} {% for message in messages %}{{ message.content }}{% endfor %}"


def test_templates_read_the_time_at_which_the_data_was_staged(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RPG_TEMPLATE_CLOCK", raising=False)
    tokenizer.chat_template = DATED
    today = datetime.now().strftime("%d %b %Y")
    assert render(tokenizer, [{"role": "user", "content": "a"}]) == f"{today} a"
    chat = data(100, ChatPrompt())
    publish(tmp_path, "train", '[{"role": "user", "content": "b"}]')
    (tmp_path / "summary.json").write_text('{"staged_at": "2024-02-03T04:05:06"}')
    assert load_problems(tmp_path, "train", tokenizer, chat)[0].prompt == "03 Feb 2024 b"
    # And so do conversations, judges and processes that are started from here on.
    assert render(tokenizer, [{"role": "user", "content": "a"}]) == "03 Feb 2024 a"


def test_data_of_an_earlier_version_was_staged_when_its_summary_was_written(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RPG_TEMPLATE_CLOCK", raising=False)
    tokenizer.chat_template = DATED
    publish(tmp_path, "train", '[{"role": "user", "content": "b"}]')
    (tmp_path / "summary.json").write_text("{}")
    day = datetime(2023, 5, 6, 12).timestamp()
    os.utime(tmp_path / "summary.json", (day, day))
    assert load_problems(tmp_path, "train", tokenizer, data(100, ChatPrompt()))[0].prompt == "06 May 2023 b"
