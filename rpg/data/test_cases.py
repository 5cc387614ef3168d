"""Reads tests of programs from the columns of widely used sets.

Each format is a function of a row's columns, under its name in specs. It returns plain data, see `TestCases`.
"""

import base64
import binascii
import io
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from specs.documents.strict_json import parse_json
from specs.schema.fields import nearest

Format = Literal[
    "none", "taco", "livecodebench", "verification_info", "deepcoder", "codeforces", "mbpp", "humaneval", "cases"
]
FORMATS = tuple(name for name in get_args(Format) if name != "none")
Case = tuple[Any, Any]
"""Input and output as texts; for a function call, the list of arguments and the value."""
_LONGEST_UNPACKED = 1 << 30


class BadTestsError(ValueError):
    """Error raised for a row whose tests have no known form."""


@dataclass(frozen=True, slots=True)
class TestCases:
    """The tests of one problem."""

    kind: Literal["stdin", "call", "assert"]
    """`stdin`: a program reads and prints. `call`: a function is called. `assert`: statements run after the program."""
    shown: Sequence[Any] = ()
    """Cases that the problem shows. With kind assert, they are statements."""
    hidden: Sequence[Any] = ()
    """Cases that the problem does not show; all cases if the set does not separate them."""
    function: str = ""
    """Name of the function that is called, or that the statements need."""
    setup: str = ""
    """Code that runs before the program, for tests of kind assert."""
    grader: Literal["apps", "livecodebench"] = "apps"
    """Grader that compares outputs. APPS's grader, which TACO and later sets use, accepts numbers that are close, and a
    list with the expected value instead of the value."""

    def as_data(self) -> dict[str, Any]:
        """Returns the form in which the tests are stored with the problem."""
        return asdict(self)


def cases_of(form: str, row: Mapping[str, Any]) -> TestCases:
    """Returns the tests in a row. Raises BadTestsError if the row has no tests of that form.

    Args:
        form: the format's name.
        row: column -> value, with at least the columns that `columns_of` names.
    """
    needed, _, read = _FORMATS[form]
    if lacking := [column for column in needed if row.get(column) is None]:
        hint = nearest(lacking[0], list(row))
        raise BadTestsError(f"no column `{lacking[0]}`, which tests: {form} reads{'; ' + hint if hint else ''}")
    tests = read(row)
    if not tests.shown and not tests.hidden:
        raise BadTestsError("there is no test")
    return tests


def columns_of(form: str) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the columns that a format reads: the required ones and the optional ones."""
    needed, more, _ = _FORMATS[form]
    return needed, more


def _taco(row: Mapping[str, Any]) -> TestCases:
    """Reads BAAI/TACO and codeparrot/apps: {inputs, outputs, fn_name}."""
    tests = _object(row["input_output"], "input_output")
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadTestsError("`input_output` holds no `inputs` and `outputs` of one length")
    pairs = list(zip(inputs, outputs, strict=True))
    if function:
        return TestCases("call", hidden=[_call(*pair) for pair in pairs], function=str(function))
    return TestCases("stdin", hidden=[_texts(*pair) for pair in pairs])


def _livecodebench(row: Mapping[str, Any]) -> TestCases:
    """Reads livecodebench/code_generation_lite: lists of {input, output, testtype}, the private ones compressed."""
    shown = _list(row["public_test_cases"], "public_test_cases")
    hidden = _list(_unpacked(row.get("private_test_cases")), "private_test_cases")
    about = _object(row.get("metadata") or "{}", "metadata")
    return _typed(shown, hidden, "testtype", str(about.get("func_name") or ""), "livecodebench")


def _verification_info(row: Mapping[str, Any]) -> TestCases:
    """Reads PrimeIntellect/verifiable-coding-problems and SYNTHETIC-1, open-r1/verifiable-coding-problems-python."""
    tests = _object(row["verification_info"], "verification_info").get("test_cases")
    return _typed((), _list(tests, "verification_info.test_cases"), "type", "")


def _deepcoder(row: Mapping[str, Any]) -> TestCases:
    """Reads agentica-org/DeepCoder-Preview-Dataset: TACO's object, or a list in the form of the other two."""
    tests = _parsed(row["tests"], "tests")
    if isinstance(tests, dict):
        return _taco({"input_output": tests})
    about = _object(row.get("metadata") or "{}", "metadata")
    typed = _list(tests, "tests")
    tag = "testtype" if any("testtype" in test for test in typed) else "type"
    return _typed((), typed, tag, str(about.get("func_name") or ""), "livecodebench" if tag == "testtype" else "apps")


def _codeforces(row: Mapping[str, Any]) -> TestCases:
    """Reads open-r1/codeforces: `examples` are shown, `official_tests` are not. Problems with a checker are
    unsupported."""
    if row.get("generated_checker") or row.get("checker"):
        raise BadTestsError("the problem has its own checker, which is not run: leave such rows out")
    shown, hidden = (_list(row.get(name) or [], name) for name in ("examples", "official_tests"))
    return _typed(shown, hidden, "type", "")


def _mbpp(row: Mapping[str, Any]) -> TestCases:
    """Reads evalplus/mbppplus (`test` is hidden) and google-research-datasets/mbpp: asserts."""
    shown = _texts_of(row["test_list"], "test_list")
    more = [row["test"]] if row.get("test") else _texts_of(row.get("challenge_test_list") or [], "challenge_test_list")
    setup = "\n".join([*_texts_of(row.get("test_imports") or [], "test_imports"), row.get("test_setup_code") or ""])
    return TestCases("assert", shown, more, setup=setup)


def _humaneval(row: Mapping[str, Any]) -> TestCases:
    """Reads openai/openai_humaneval and evalplus/humanevalplus: `test` defines check(candidate)."""
    function = str(row["entry_point"])
    if "def check(" not in str(row["test"]):
        raise BadTestsError("`test` defines no check(candidate)")
    statements = f"{row['test']}\ncheck({function})"
    return TestCases("assert", hidden=[statements], function=function, setup=str(row.get("prompt") or ""))


def _cases(row: Mapping[str, Any]) -> TestCases:
    """Reads a user's own sets: `tests` is a list of {input, output}, of {arguments, value} with `function`, or of
    asserts."""
    tests, function = _parsed(row["tests"], "tests"), str(row.get("function") or "")
    if not isinstance(tests, list):
        raise BadTestsError(f"`tests` is not a list: {_short(tests)}")
    if all(isinstance(test, str) for test in tests):
        return TestCases("assert", hidden=tests, function=function)
    keys = ("arguments", "value") if function else ("input", "output")
    split: tuple[list[Case], list[Case]] = ([], [])
    for number, test in enumerate(tests, 1):
        if not isinstance(test, dict) or any(key not in test for key in keys):
            raise BadTestsError(f"test {number} lacks {' or '.join(keys)}: {_short(test)}")
        if function and not isinstance(test["arguments"], list):
            raise BadTestsError(f"test {number}: `arguments` is not a list: {_short(test['arguments'])}")
        pair = (test[keys[0]], test[keys[1]])
        split[not test.get("shown", False)].append(pair if function else _texts(*pair))
    return TestCases("call" if function else "stdin", *split, function=function, grader="livecodebench")


_FORMATS: dict[str, tuple[Sequence[str], Sequence[str], Callable[[Mapping[str, Any]], TestCases]]] = {
    "taco": (("input_output",), (), _taco),
    "livecodebench": (("public_test_cases",), ("private_test_cases", "metadata"), _livecodebench),
    "verification_info": (("verification_info",), (), _verification_info),
    "deepcoder": (("tests",), ("metadata",), _deepcoder),
    "codeforces": (("official_tests",), ("examples", "generated_checker", "checker"), _codeforces),
    "mbpp": (("test_list",), ("test", "challenge_test_list", "test_imports", "test_setup_code"), _mbpp),
    "humaneval": (("test", "entry_point"), ("prompt",), _humaneval),
    "cases": (("tests",), ("function",), _cases),
}


def _typed(
    shown: Sequence[Any],
    hidden: Sequence[Any],
    tag: str,
    function: str,
    grader: Literal["apps", "livecodebench"] = "apps",
) -> TestCases:
    """Returns tests that say themselves whether they are calls. In LiveCodeBench arguments are JSON texts, one per
    line."""
    groups: tuple[list[Case], list[Case]] = ([], [])
    kinds, names = set(), {function} - {""}
    for group, tests in zip(groups, (shown, hidden), strict=True):
        for number, test in enumerate(tests, 1):
            if not isinstance(test, dict) or "input" not in test or "output" not in test:
                raise BadTestsError(f"test {number} lacks input or output: {_short(test)}")
            kind = str(test.get(tag) or "stdin")
            if kind not in _KINDS:
                raise BadTestsError(f"test {number} is of unknown `{tag}`: {kind}; known: {', '.join(_KINDS)}")
            kinds.add(_KINDS[kind])
            names |= {str(test["fn_name"])} if test.get("fn_name") else set()
            group.append(_case(_KINDS[kind], test["input"], test["output"], number, lines=grader == "livecodebench"))
    if len(kinds) > 1 or len(names) > 1:
        raise BadTestsError("the tests are of more than one kind, or of more than one function")
    if "call" in kinds and not names:
        raise BadTestsError("the tests are calls, but no test names the function (fn_name, func_name)")
    return TestCases("call" if "call" in kinds else "stdin", *groups, function=next(iter(names), ""), grader=grader)


_KINDS = {"stdin": "stdin", "stdin_stdout": "stdin", "functional": "call", "function_call": "call"}


def _case(kind: str, given: Any, expected: Any, number: int, *, lines: bool) -> Case:
    if kind == "stdin":
        return _texts(given, expected)
    if not lines:
        return _call(given, expected)
    try:
        return [parse_json(line) for line in str(given).splitlines() if line.strip()], parse_json(expected)
    except ValueError as error:
        raise BadTestsError(f"test {number} is a call whose arguments or value are not JSON: {error}") from None


def _texts(given: Any, expected: Any) -> Case:
    """Returns input and output of a program. Some sets have them as lists of lines."""
    return _lines(given), _lines(expected)


def _lines(text: Any) -> str:
    return "\n".join(map(_lines, text)) if isinstance(text, list) else str(text)


def _call(given: Any, expected: Any) -> Case:
    """Returns arguments and value. Restores integer keys, which APPS and TACO intend but JSON cannot have."""
    arguments, value = (_from_text(each) for each in (given, expected))
    if not isinstance(arguments, list):
        raise BadTestsError(f"the arguments of a call are not a list: {_short(arguments)}")
    return [_with_numbers(argument) for argument in arguments], value


def _from_text(value: Any) -> Any:
    """Returns a value that may be given as JSON text."""
    if isinstance(value, str):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value


def _with_numbers(argument: Any) -> Any:
    if isinstance(argument, dict) and argument and all(key.lstrip("-").isdigit() for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _unpacked(packed: Any) -> Any:
    """Returns LiveCodeBench's private tests from JSON, or from base64 of zlib of a pickled text."""
    if not isinstance(packed, str) or packed.lstrip().startswith("["):
        return packed or []
    try:
        inflater = zlib.decompressobj()
        unpacked = inflater.decompress(base64.b64decode(packed, validate=True), _LONGEST_UNPACKED)
        return _TextAlone(io.BytesIO(unpacked)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise BadTestsError(f"`private_test_cases` cannot be unpacked: {error}") from None


class _TextAlone(pickle.Unpickler):
    """An unpickler of plain values only: any other pickle could run code that a dataset names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a text needs none")


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadTestsError(f"`{name}` is not JSON: {error}") from None


def _object(value: Any, name: str) -> dict[str, Any]:
    parsed = _parsed(value, name)
    if not isinstance(parsed, dict):
        raise BadTestsError(f"`{name}` is not an object: {_short(parsed)}")
    return parsed


def _list(value: Any, name: str) -> list[Any]:
    parsed = _parsed(value, name)
    if not isinstance(parsed, list):
        raise BadTestsError(f"`{name}` is no list: {_short(parsed)}")
    return parsed


def _texts_of(value: Any, name: str) -> list[str]:
    texts = _from_text(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadTestsError(f"`{name}` is not a list of texts: {_short(texts)}")
    return texts


def _short(value: Any) -> str:
    return repr(value)[:80]
