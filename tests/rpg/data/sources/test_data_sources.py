"""The problems of each source, and its exact error messages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import SHARED

from rpg.data.problems import SourceProblem
from rpg.data.prompts import staged
from specs.errors import Issue, SpecError
from specs.schema.data import Source, TemplatePrompt

DAPO_ROW: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
}


def read(**fields: Any) -> list[SourceProblem]:
    return list(Source.model_validate(fields).read())


def wrong(**fields: Any) -> Issue:
    (problem,) = all_wrong(**fields)
    return problem


def all_wrong(**fields: Any) -> tuple[Issue, ...]:
    with pytest.raises(SpecError) as caught:
        read(**fields)
    return caught.value.issues


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_parquet_in_the_dapo_schema_needs_no_settings(tmp_path: Path) -> None:
    file = parquet(tmp_path / "maths.parquet", DAPO_ROW)
    (problem,) = read(source="parquet", path=str(file))
    assert problem == SourceProblem([{"role": "user", "content": "What is 1 + 1?"}], "2", "maths")


def test_jsonl_in_the_dapo_schema_reads_the_same(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "maths.jsonl", DAPO_ROW)
    assert read(source="jsonl", path=str(file)) == read(
        source="parquet", path=str(parquet(tmp_path / "maths.parquet", DAPO_ROW))
    )


def test_plain_columns_a_number_as_answer_and_a_column_for_the_origin(tmp_path: Path) -> None:
    file = parquet(tmp_path / "plain.parquet", {"q": "1 + 1", "extra": {"gold": 2}, "from": "sums"})
    columns = {"prompt": "q", "answer": "extra.gold", "data_source": "from"}
    assert read(source="parquet", path=str(file), columns=columns) == [SourceProblem("1 + 1", "2", "sums")]


def test_a_column_whose_name_has_a_dot_is_found_before_a_struct(tmp_path: Path) -> None:
    file = parquet(tmp_path / "dots.parquet", {"prompt": "p", "a.b": "flat", "a": {"b": "deep"}})
    assert read(source="parquet", path=str(file), columns={"answer": "a.b"})[0].answer == "flat"


def test_a_hub_source_reads_a_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "sums"
    directory.mkdir()
    jsonl(directory / "train.jsonl", {"q": "1 + 1", "a": "2"}, {"q": "1 + 2", "a": "3"})
    problems = read(source="hub", path=str(directory), columns={"prompt": "q", "answer": "a"})
    assert problems == [SourceProblem("1 + 1", "2", "sums"), SourceProblem("1 + 2", "3", "sums")]

    problem = wrong(source="hub", path=str(directory), columns={"prompt": "query", "answer": "a"})
    assert (problem.message, problem.allowed) == ("sums has no column `query`", "q, a")
    problem = wrong(source="hub", path=str(directory), split="test")
    assert problem.path == ("split",)
    assert problem.message == "the dataset cannot be loaded: Unknown split \"test\". Should be one of ['train']."


@pytest.mark.parametrize(
    ("name", "split", "row", "answer"),
    [
        ("aime24", "train", {"id": 60, "problem": "What is $1+1$?", "answer": "2", "url": "-", "year": "2024"}, "2"),
        ("amc23", "test", {"id": 0, "question": "What is $1+1$?", "answer": "2", "url": "-"}, "2"),
        ("olympiadbench", "test", {"question": "What is $1+1$?", "final_answer": ["$2$", "$3$"]}, "$2$, $3$"),
    ],
)
def test_a_published_set_is_read_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: str, row: dict[str, Any], answer: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    directory = tmp_path / "copy"
    directory.mkdir()
    jsonl(directory / f"{split}.jsonl", row)
    bare = read(source="suite", name=name, path=str(directory))
    assert bare == [SourceProblem("What is $1+1$?", answer, name)]
    (asked,) = read(source="suite", name=name, path=str(directory), instruction="answer_line")
    assert asked.prompt == DAPO_PROMPT.format("What is $1+1$?")
    (asked,) = read(source="suite", name=name, path=str(directory), instruction="boxed")
    assert asked.prompt == "What is $1+1$?\n\nPlease reason step by step, and put your final answer within \\boxed{}."


DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
SHARED_DATA = SHARED / "data"


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the papers' evaluation files are not here")
@pytest.mark.parametrize("file", ["aime-2024", "aime25", "amc-23"])
def test_the_answer_line_is_that_of_the_papers_files(file: str) -> None:
    for row in pq.read_table(SHARED_DATA / f"{file}.parquet").to_pylist():
        assert row["prompt"][0]["content"] == DAPO_PROMPT.format(row["extra_info"]["raw_problem"])


COLUMNS = {"prompt": "problem", "answer": "answer", "data_source": ""}


def test_a_set_that_the_name_stands_for_is_part_of_what_makes_the_data() -> None:
    known = Source.model_validate({"source": "suite", "name": "math500"}).identity()
    dataset = {"path": "HuggingFaceH4/MATH-500", "split": "test", "columns": COLUMNS}
    assert dataset.items() <= known.items()
    with pytest.raises(ValueError, match="aime24"):
        Source.model_validate({"source": "suite", "name": "aime23"})


def test_a_hub_directory_that_holds_no_data(tmp_path: Path) -> None:
    problem = wrong(source="hub", path=str(tmp_path))
    assert problem.path == ("path",)
    assert problem.message.startswith("the dataset cannot be loaded: ")


def test_reasoning_gym_gives_the_entry_the_scorer_needs() -> None:
    config = {"min_terms": 2, "max_terms": 2}
    problems = read(source="reasoning_gym", task="chain_sum", config=config, size=3, seed=5)
    assert len(problems) == 3
    first = problems[0]
    assert first.dataset == "chain_sum"
    assert first.metadata["task"] == "chain_sum"
    assert first.metadata["config"] == config
    assert first.metadata["entry"]["answer"] == first.answer == str(eval(first.fields["expression"]))
    assert read(source="reasoning_gym", task="chain_sum", config=config, size=3, seed=5) == problems


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    parquet(tmp_path / "maths.parquet", DAPO_ROW)
    given = str(tmp_path / "math.parquet")
    assert wrong(source="parquet", path=given) == Issue(
        "no such file", path=("path",), given=given, hint="did you mean `maths.parquet`?"
    )


def test_missing_directory_and_directory_instead_of_file(tmp_path: Path) -> None:
    assert wrong(source="jsonl", path=str(tmp_path / "no" / "a.jsonl")).hint == f"there is no directory {tmp_path}/no"
    assert wrong(source="jsonl", path=str(tmp_path)).message == "is a directory, not a file"


def test_missing_column_in_parquet_says_which_there_are(tmp_path: Path) -> None:
    file = parquet(tmp_path / "maths.parquet", DAPO_ROW)
    assert wrong(source="parquet", path=str(file), columns={"answer": "ground_truth"}) == Issue(
        "maths.parquet has no column `ground_truth`",
        path=("columns", "answer"),
        given="ground_truth",
        allowed="data_source, prompt, reward_model.ground_truth, reward_model.style",
        hint="did you mean `reward_model.ground_truth`?",
    )


def test_missing_columns_near_to_none_are_all_named_with_how_to_name_them(tmp_path: Path) -> None:
    row = {"q": "1 + 1", "a": "2"}
    for kind, file in (
        ("parquet", parquet(tmp_path / "plain.parquet", row)),
        ("jsonl", jsonl(tmp_path / "plain.jsonl", row)),
    ):
        assert [issue.hint for issue in all_wrong(source=kind, path=str(file))] == [
            "say which column holds the prompt: `columns: {prompt: ...}`",
            "say which column holds the answer: `columns: {answer: ...}`",
        ]


def test_missing_column_in_jsonl_names_the_line(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "maths.jsonl", DAPO_ROW, {"promt": "1", "reward_model": {"ground_truth": "2"}})
    assert wrong(source="jsonl", path=str(file)) == Issue(
        "maths.jsonl, line 2 has no column `prompt`",
        path=("columns", "prompt"),
        given="prompt",
        allowed="promt, reward_model.ground_truth",
        hint="did you mean `promt`?",
    )


@pytest.mark.parametrize("keep", [0.5, 0.95])
def test_truncated_parquet(tmp_path: Path, keep: float) -> None:
    file = parquet(tmp_path / "maths.parquet", *[DAPO_ROW] * 100)
    os.truncate(file, int(file.stat().st_size * keep))
    assert wrong(source="parquet", path=str(file)) == Issue(
        "the Parquet file is cut short",
        path=("path",),
        given=f"{file} ({file.stat().st_size} bytes)",
        hint="copy or download it again",
    )


def test_damaged_parquet(tmp_path: Path) -> None:
    file = parquet(tmp_path / "maths.parquet", *[DAPO_ROW] * 100)
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(bytes(content))
    assert wrong(source="parquet", path=str(file)).message.startswith("the Parquet file cannot be read: ")


def test_text_is_no_parquet(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "maths.parquet", DAPO_ROW)
    problem = wrong(source="parquet", path=str(file))
    assert (problem.message, problem.hint) == ("not a Parquet file", "use the source that fits the file: jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "p"', "maths.jsonl, line 3: not JSON: Expecting ',' delimiter at character 15"),
        (b'["p", "a"]', "maths.jsonl, line 3: not a JSON object"),
        (b'{"prompt": "\xff"}', "maths.jsonl, line 3: not UTF-8"),
        (b"[" * 100_000, "maths.jsonl, line 3: nested too deeply"),
        (b'{"prompt": "a \\ud83d smile"}', "maths.jsonl, line 3: half a character: \\ud83d without its other half"),
        (b'{"prompt": "p", "n": ' + b"7" * 5000 + b"}", "maths.jsonl, line 3: a whole number of 5000 digits"),
        (b'{"prompt": "p", "n": NaN}', "maths.jsonl, line 3: NaN, which JSON does not have"),
        (b'{"prompt": "p", "n": [-Infinity]}', "maths.jsonl, line 3: -Infinity, which JSON does not have"),
        (b'{"prompt": "p", "n": 1e999}', "maths.jsonl, line 3: 1e999, which is too large for a float"),
        (b'{"prompt": "p", "prompt": "q"}', 'maths.jsonl, line 3: the key "prompt" twice in one object'),
    ],
)
def test_a_bad_jsonl_line_is_named_by_its_number(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "maths.jsonl"
    file.write_bytes(json.dumps(DAPO_ROW).encode() + b"\n\n" + line + b"\n")
    problem = wrong(source="jsonl", path=str(file))
    assert problem.message.startswith(message)
    assert problem.path == ("path",)


@pytest.mark.parametrize("prompt", [7, "", [], [{"role": "user"}], None])
def test_a_prompt_that_is_none(tmp_path: Path, prompt: Any) -> None:
    file = jsonl(tmp_path / "maths.jsonl", {**DAPO_ROW, "prompt": prompt})
    assert wrong(source="jsonl", path=str(file)) == Issue(
        "maths.jsonl, line 1: `prompt` holds no prompt",
        path=("columns", "prompt"),
        given=repr(prompt),
        allowed="text, or a list of messages {role, content}",
    )


@pytest.mark.parametrize("answer", [None, "", " ", ["2"]])
def test_an_answer_that_is_none(tmp_path: Path, answer: Any) -> None:
    file = jsonl(tmp_path / "maths.jsonl", {**DAPO_ROW, "reward_model": {"ground_truth": answer}})
    problem = wrong(source="jsonl", path=str(file))
    assert problem.message == "maths.jsonl, line 1: `reward_model.ground_truth` holds no answer"


def test_reasoning_gym_comes_without_plots_and_the_task_that_takes_their_library_gets_it() -> None:
    code = (
        "import sys; from rpg.data.sources.reasoning_gym import ReasoningGymSource as Source\n"
        "def made(task): return next(Source(source='reasoning_gym', task=task, size=1).read()).prompt\n"
        "made('chain_sum'); print('matplotlib' in sys.modules, 'cellpylib' in sys.modules)\n"
        "made('game_of_life'); print('cellpylib' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False", "True"]


def test_unknown_reasoning_gym_task_names_the_nearest() -> None:
    problem = wrong(source="reasoning_gym", task="chain_sums", size=1)
    assert problem.path == ("task",)
    assert (problem.message, problem.given, problem.hint) == ("unknown task", "chain_sums", "did you mean `chain_sum`?")


def test_unknown_reasoning_gym_setting_names_the_nearest() -> None:
    problem = wrong(source="reasoning_gym", task="chain_sum", size=1, config={"min_term": 2})
    assert problem == Issue(
        "unknown setting of chain_sum",
        path=("config", "min_term"),
        given="min_term",
        allowed="allow_negation, max_digits, max_terms, min_digits, min_terms",
        hint="did you mean `min_terms`?",
    )


def test_reasoning_gym_settings_that_contradict_each_other() -> None:
    problem = wrong(source="reasoning_gym", task="chain_sum", size=1, config={"min_terms": 5, "max_terms": 2})
    assert problem == Issue(
        "reasoning_gym rejects the settings of chain_sum: max_terms must be >= min_terms",
        path=("config",),
        given="min_terms: 5, max_terms: 2",
    )


def test_a_column_may_name_the_cluster_that_a_problem_belongs_to(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1", "answer": n + 1, "about": {"passage": n // 2}} for n in range(3)]
    fields = {"columns": {"answer": "answer"}, "cluster": "about.passage"}
    for source, file in (
        ("parquet", parquet(tmp_path / "a.parquet", *rows)),
        ("jsonl", jsonl(tmp_path / "a.jsonl", *rows)),
    ):
        problems = read(source=source, path=str(file), **fields)
        assert [problem.cluster for problem in problems] == ["0", "0", "1"]
    issue = wrong(source="jsonl", path=str(file), columns={"answer": "answer"}, cluster="theme")
    assert issue.path == ("cluster",)
    assert issue.hint == "say which column holds the cluster: `cluster: ...`"


def test_a_set_without_clusters_is_identified_as_it_was() -> None:
    plain = Source.model_validate({"source": "jsonl", "path": "/data/a.jsonl"}).identity()
    named = Source.model_validate({"source": "jsonl", "path": "/data/a.jsonl", "cluster": "theme"}).identity()
    assert "cluster" not in plain
    assert named == plain | {"cluster": "theme"}


def csv_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_csv_names_its_columns_in_the_first_line(tmp_path: Path) -> None:
    file = csv_file(tmp_path / "sums.csv", '\ufeffquestion,answer,level\n"1 + 1,\nplease",2,easy\n\n2 + 2,4,hard\n')
    columns = {"prompt": "question", "answer": "answer", "keep": ["level"]}
    first, second = read(source="csv", path=str(file), columns=columns)
    assert (first.prompt, first.answer, first.dataset) == ("1 + 1,\nplease", "2", "sums")
    assert (first.metadata, second.metadata) == ({"level": "easy"}, {"level": "hard"})
    semicolons = csv_file(tmp_path / "more.csv", "prompt;answer\n1;2\n")
    (problem,) = read(source="csv", path=str(semicolons), delimiter=";", columns={"answer": "answer"})
    assert problem.answer == "2"


@pytest.mark.parametrize(
    "text",
    [
        ",prompt,answer\n0,1,2\n",
        "prompt,answer,\n1,2,\n",
        "prompt,answer\n1,2,\n",
        "\ufeff,prompt,answer,\n0,1,2,\n",
    ],
)
def test_csv_leaves_an_index_and_a_trailing_separator_out(tmp_path: Path, text: str) -> None:
    (problem,) = read(source="csv", path=str(csv_file(tmp_path / "sums.csv", text)), columns={"answer": "answer"})
    assert (problem.prompt, problem.answer) == ("1", "2")


@pytest.mark.parametrize("other", [";", "\t", "|"])
def test_another_delimiter_of_csv_is_named(tmp_path: Path, other: str) -> None:
    file = csv_file(tmp_path / "sums.csv", f"prompt{other}answer\n1, please{other}2\n")
    issue = wrong(source="csv", path=str(file), columns={"answer": "answer"})
    assert (issue.path, issue.hint) == (("delimiter",), f"write `delimiter: {json.dumps(other)}`")


def test_a_file_of_one_column_has_any_delimiter(tmp_path: Path) -> None:
    file = csv_file(tmp_path / "sums.csv", "prompt\n1\n")
    columns = {"prompt": "prompt", "answer": "prompt"}
    assert [each.prompt for each in read(source="csv", path=str(file), delimiter=";", columns=columns)] == ["1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",\n1,2\n", "bad.csv: its first line must name the columns, each once"),
        ("a,b\n1,2,3\n", "bad.csv, line 2: 3 values for 2 columns"),
        ("a,a\n1,2\n", "bad.csv: its first line must name the columns, each once"),
        ('a,b\n1,"2\n', "bad.csv, line 2: not CSV: unexpected end of data"),
        ("prompt,b\n1,2\n", "bad.csv, line 2 has no column `answer`"),
    ],
)
def test_a_csv_file_that_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = csv_file(tmp_path / "bad.csv", text)
    columns = {"prompt": text.partition(",")[0], "answer": "answer" if "prompt" in text else "b"}
    assert wrong(source="csv", path=str(file), columns=columns).message == message


def test_columns_that_are_kept_are_the_problems_own(tmp_path: Path) -> None:
    file = parquet(tmp_path / "maths.parquet", DAPO_ROW | {"level": 3})
    (problem,) = read(source="parquet", path=str(file), columns={"keep": ["level", "reward_model.style"]})
    template = TemplatePrompt(template="{metadata.level}, {metadata.reward_model.style}: {prompt}")
    assert staged(problem, template).prompt.startswith("3, rule: ")
    assert problem.metadata == {"level": 3, "reward_model.style": "rule"}
    issue = wrong(source="parquet", path=str(file), columns={"keep": ["levels"]})
    assert (issue.message, issue.path) == ("maths.parquet has no column `levels`", ("columns", "keep"))


def test_columns_that_agents_are_given_are_the_problems_own_too(tmp_path: Path) -> None:
    file = parquet(tmp_path / "maths.parquet", DAPO_ROW | {"level": 3})
    (problem,) = read(source="parquet", path=str(file), columns={"keep": ["level"], "shown": ["reward_model.style"]})
    assert problem.metadata == {"level": 3, "reward_model.style": "rule"}
    assert problem.shown == ("reward_model.style",)
    issue = wrong(source="parquet", path=str(file), columns={"shown": ["levels"]})
    assert (issue.message, issue.path) == ("maths.parquet has no column `levels`", ("columns", "shown"))
