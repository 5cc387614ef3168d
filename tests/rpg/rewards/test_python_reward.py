"""A reward in one file: its function's arguments and return values, and the messages of its faults."""

import json
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from pipelines.planning.fingerprint import train_identity
from rpg.rewards import Score, open_scorer
from rpg.rewards.functions.python import Python
from rpg.types import Problem
from specs.document import Document
from specs.errors import SpecError
from specs.loader import load_document
from specs.schema.reward import Reward

PROBLEM = Problem("p", prompt="6 * 7 =", answer="42", dataset="sums", metadata={"level": 3})
STARTER = ROOT / "specs" / "experiments" / "quickstart.yaml"


def reward(code: str, **options: Any) -> Python:
    return Python(type="python", path="/somewhere/reward.py", code=code, **options)


def scored(code: str, response: str = "42", **options: Any) -> Score:
    from rpg.rewards.score import verdict

    made = reward(code, **options)
    made.prepare()
    return verdict(made, PROBLEM, response)


def written(tmp_path: Path, code: str, changes: str = "{type: python, path: reward.py, function: score}") -> Document:
    (tmp_path / "reward.py").write_text(code)
    (tmp_path / "own.yaml").write_text(f"extends: {STARTER}\nname: own\nreward: {changes}\n")
    return load_document(tmp_path / "own.yaml")


def refused(tmp_path: Path, code: str, changes: str = "{type: python, path: reward.py, function: score}") -> str:
    with pytest.raises(SpecError) as raised:
        written(tmp_path, code, changes)
    return str(raised.value).replace(str(tmp_path), "")


def test_a_function_is_given_what_it_names() -> None:
    assert scored("def score(response, answer):\n return response == answer").value == 1.0
    assert scored("def score(answer, level, prompt):\n return level * len(prompt)").value == 21.0
    assert scored("def score(**columns):\n return len(columns)").value == 6.0
    assert scored("def score(response, tries=2):\n return tries / 4").correct is False


def test_a_function_of_trls_signature_is_given_lists_of_one() -> None:
    code = "def score(completions, answer, **kwargs):\n return [float(c == a) for c, a in zip(completions, answer)]"
    assert (scored(code).value, scored(code, "41").value) == (1.0, 0.0)
    assert scored("def score(prompts, completions, level, **kw):\n return [level[0] + len(prompts)]").value == 4.0


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def score(response):\n return None", "TypeError: score returned None, not a number"),
        ("def score(response):\n return float('nan')", "ValueError: score returned nan"),
        ("def score(completions):\n return 1.0", "TypeError: score returned 1.0, not a list with one number"),
        (
            "def score(solution):\n return 1",
            "ValueError: score takes 'solution', but a problem has only: level, prompt",
        ),
        (
            "def score(response):\n return int(response[9])",
            "IndexError: string index out of range (/somewhere/",
        ),
        ("import nothing_of_the_kind\ndef score(response):\n return 1", "ModuleNotFoundError: No module named"),
        ("raise SystemExit\ndef score(response):\n return 1", "/somewhere/reward.py ended its process"),
    ],
)
def test_a_fault_of_the_function_is_told_with_the_line_of_its_file(code: str, told: str) -> None:
    assert told in str(scored(code).error)


def test_a_fault_below_a_library_is_told_at_the_users_line() -> None:
    error = scored("import json\ndef score(response):\n    return json.loads(response)", "no json").error
    assert str(error).endswith("(/somewhere/reward.py:3)")


def test_responses_vote_by_their_whole_text() -> None:
    code = "def score(response, answer):\n return response.strip() == answer"
    assert [scored(code, response).extracted for response in (" 42\n", "41", " ")] == ["42", "41", None]


def test_grades_are_no_right_answers() -> None:
    score = scored("def score(response):\n return -len(response)", gives="grades", least=-5.0)
    assert (score.value, score.correct) == (-2.0, None)
    assert scored("def score(response):\n return 1 / 0", gives="grades", least=-5.0).value == -5.0


@pytest.mark.needs("bubblewrap")
def test_the_function_runs_in_the_sandbox_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("here")
    code = (
        "import os, socket\n"
        "def score(response):\n"
        f"    assert not os.path.exists({str(secret)!r}), 'read a file'\n"
        "    try:\n"
        "        socket.create_connection(('127.0.0.1', 9), 0.1)\n"
        "    except ConnectionRefusedError:\n"
        "        return 0\n"
        "    except OSError:\n"
        "        return 1\n"
    )
    with open_scorer(reward(code)) as scorer:
        (score,) = scorer.score([PROBLEM], ["42"])
    assert score == Score.of(1.0, "42")


def test_the_files_content_is_in_the_fingerprint_and_its_place_is_not(tmp_path: Path) -> None:
    code = "def score(response):\n return 1\n"
    first = train_identity(written(tmp_path, code).experiment)
    other = tmp_path / "other"
    other.mkdir()
    assert train_identity(written(other, code).experiment) == first
    assert train_identity(written(other, code + "# more\n").experiment) != first


def test_a_frozen_spec_needs_the_file_no_more(tmp_path: Path) -> None:
    document = written(tmp_path, "def score(response):\n return 1\n")
    frozen = json.loads(json.dumps(document.to_json()))
    (tmp_path / "reward.py").unlink()
    assert Document.from_json(frozen).experiment == document.experiment


def test_what_is_wrong_with_the_file_is_told_at_its_own_line(tmp_path: Path) -> None:
    assert refused(tmp_path, "def score(response):\n    return (1\n") == (
        "/reward.py:2: reward.path: is not valid Python: '(' was never closed\n    2 |     return (1"
    )
    assert refused(tmp_path, "def other(response):\n    return 1\n").splitlines()[0] == (
        "/own.yaml:3: reward.function: the file has no such function"
    )
    assert "allowed: other" in refused(tmp_path, "def other(response):\n    return 1\n")
    assert refused(tmp_path, "", "{type: python, path: nowhere.py}").splitlines()[0] == (
        "/own.yaml:3: reward.path: no such file"
    )
    assert "is not a file of at most 64 KiB" in refused(tmp_path, "#" * (1 << 17))


def test_a_file_is_not_varied_without_its_text(tmp_path: Path) -> None:
    changes = "{type: python, path: reward.py}\nmatrix: {product: {reward.path: [reward.py, other.py]}}"
    assert refused(tmp_path, "def score(response):\n return 1\n", changes).splitlines() == [
        "/own.yaml:4: matrix.product[reward.path]: cannot vary by itself",
        "    4 | matrix: {product: {reward.path: [reward.py, other.py]}}",
        "  hint: vary the whole reward: reward: [{type: python, path: ...}, ...]",
    ]


def test_rewards_of_two_files_are_cells_of_a_matrix(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def score(response):\n return 0\n")
    cells = "[{type: python, path: reward.py}, {type: python, path: other.py}]"
    changes = f"{{type: python, path: reward.py}}\nmatrix: {{product: {{reward: {cells}}}}}"
    document = written(tmp_path, "def score(response):\n return 1\n", changes)
    first, second = document.source["matrix"]["product"]["reward"]
    assert (first["code"], second["code"]) == ("def score(response):\n return 1\n", "def score(response):\n return 0\n")


def test_a_reward_of_any_size_reaches_its_worker() -> None:
    """An argument of a process has at most 128 KiB."""
    code = "# " + "x" * 60_000 + "\ndef score(response):\n return "
    terms = [
        {"name": name, "reward": {"type": "python", "path": f"{name}.py", "code": f"{code}{value}"}}
        for name, value in (("a", 1), ("b", 2), ("c", 4))
    ]
    with open_scorer(Reward.model_validate({"type": "weighted_sum", "terms": terms})) as scorer:
        (score,) = scorer.score([PROBLEM], ["42"])
    assert (score.value, score.error) == (7.0, None)
