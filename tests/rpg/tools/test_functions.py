"""Tools: ours, and a function of an installed package."""

from pathlib import Path

import psutil
import pytest
from places import PACKAGES
from scripted_policy import ScriptedPolicy
from spec_text import GOOD, changed, message, write

from rpg.base.tokenization import make_tokenizer
from rpg.rollouters import Problem, SeededPrompt
from rpg.rollouters.environments.tools import Tools
from rpg.tools import Tool, ToolError
from rpg.tools.functions.calculator import Calculator
from rpg.types import Sampling
from specs.loader import load_experiment
from specs.schema.model import ByteTokenizer

CALCULATOR = Calculator(type="calculator")
BYTES = make_tokenizer(ByteTokenizer(), ())


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def word_count(monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.syspath_prepend(str(PACKAGES))
    (tool,) = Tools(type="tools", tools=["word_count"]).tools
    assert isinstance(tool, Tool)
    return tool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 3) * 45", "675"),
        ("2**0.5", "1.4142135623730951"),
        ("10 / 4", "2.5"),
        ("10 / 5", "2"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("99999999999 * 99999999999", "9999999999800000000001"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert CALCULATOR.call({"expression": expression}) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "a", "1 +", "__import__('os')", "(1).__class__", "9**9**9", "2**1000", "1e400", "'a' * 9", "True + 1"),
        *("[1][0]", "(" * 150 + ")" * 150, "1" * 201, "(-8)**0.5", "1,2", "x:=1"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ToolError):
        CALCULATOR.call({"expression": expression})


def test_a_function_is_described_by_its_types_and_docstring(word_count: Tool) -> None:
    function = word_count.describe()["function"]
    assert function["name"] == "word_count"
    assert function["description"] == "Counts the words of a text."
    assert function["parameters"]["properties"]["text"] == {"type": "string", "description": "what to count in"}
    assert function["parameters"]["required"] == ["text"]
    assert word_count.parameters == ("text", "at_least")


def test_a_function_is_called_by_its_types_and_what_it_raises_is_told(word_count: Tool) -> None:
    session = word_count.open()
    assert session.call({"text": "a tool that counts", "at_least": 4}) == '{"words":3}'
    with pytest.raises(ToolError, match=r"^ValueError: there is no text$"):
        session.call({"text": ""})
    with pytest.raises(ToolError, match="at_least: Input should be a valid integer"):
        session.call({"text": "a", "at_least": "many"})
    with pytest.raises(ToolError, match="Missing required argument"):
        session.call({})


def test_a_package_and_its_version_are_part_of_what_a_tool_is(word_count: Tool) -> None:
    assert word_count.identity()["type"] == "word_count (rpg-check-again 1.0)"


def with_rollouter(text: str) -> str:
    return changed("rollout: {max_response_length: 32}", f"rollout:\n  max_response_length: 32\n  rollouter: {text}")


@pytest.mark.parametrize(
    ("rollouter", "said"),
    [
        ("{type: tools, tools: [abacus]}", "unknown type"),
        ("{type: tools, tools: []}", "at least 1"),
        ("{type: tools, tools: [calculator], format: xml}", "hermes"),
        ("{type: tools, tools: [calculator, calculator], answer_tokens: 8}", "a tool is named twice"),
        ("{type: tools, tools: [calculator], answer_tokens: 31}", "a call, its answer and another turn do not fit"),
        (
            '{type: tools, tools: [calculator, python], answer_tokens: 8, format: {call: "[{argument}]"}}',
            "a call does not name its tool",
        ),
        ('{type: tools, tools: [calculator], format: {call: "[call]"}}', "call"),
    ],
)
def test_what_is_wrong_with_tools_is_said_at_its_line(rollouter: str, said: str) -> None:
    text = with_rollouter(rollouter)
    found = message(text)
    assert said in found
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "rollouter" in row)
    assert f"spec.yaml:{line}" in found


def test_a_tool_may_be_written_by_its_name_or_with_its_options() -> None:
    text = "{type: tools, tools: [calculator, {type: python, seconds: 2}], answer_tokens: 8}"
    rollouter = load_experiment(write(with_rollouter(text))).rollout.rollouter
    assert isinstance(rollouter, Tools)
    assert [tool.type for tool in rollouter.tools] == ["calculator", "python"]
    assert rollouter.runs_programs == "python"
    assert "rollouter" not in GOOD


@pytest.mark.more
def test_a_call_that_is_left_at_its_limit_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    tools = Tools(type="tools", tools=["sleeper"], format={"call": "[{argument}]", "answer": "({answer})"})
    noted = tmp_path / "ids"
    (group,) = tools.model_copy(update={"call_seconds": 6.0}).generate(
        [SeededPrompt(Problem("p", "?", "", "set"), tuple(BYTES.encode("?")), 0)],
        ScriptedPolicy(lambda context: BYTES.encode(f"[{noted}]") if len(context) == 1 else [BYTES.eos_token_id]),  # type: ignore[arg-type]
        BYTES,
        group_size=1,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_response_length=400),
    )
    assert [turn.error for turn in group.rollouts[0].turns] == ["", "no answer within 6 s", ""]
    assert [psutil.pid_exists(int(number)) for number in noted.read_text().split()] == [False, False]
