"""The scorers of reasoning-gym's tasks. Scorers that evaluate the answer get a parsed form of it."""

import builtins
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from rpg.rewards.parsing import arithmetic, formula, literal
from rpg.rewards.score import Score
from rpg.types import Problem
from specs.errors import Issue
from specs.schema.data import Source
from specs.schema.reward import Reward

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CHECKED_VERSION = "0.1.25"
"""Version of reasoning-gym whose scorers have been reviewed: only those that `PARSED` and `REFUSED` name evaluate the
answer. Tasks of other versions are not scored."""
_LIBRARY = "reasoning_gym."
_INTEGERS = re.compile(r"[0-9]+")
_PROBABILITY = re.compile(r"[0-9]{1,40}/[0-9]{1,40}|[0-9]{0,40}\.?[0-9]{0,40}(e-?[0-9]{1,2})?", re.IGNORECASE)


def _listed(answer: str, entry: dict[str, Any]) -> str:
    valid = [entry["answer"], *entry["metadata"].get("valid_answers", ())]
    return literal(answer, {text for each in valid for text in (each, each.strip())})


def _combined(answer: str, entry: dict[str, Any]) -> str:
    """Returns the arithmetic if its numbers are those of the problem and its value is 24. The task itself checks only
    how many numbers there are, and drops the value's fraction."""
    from sympy.parsing.sympy_parser import parse_expr

    written = arithmetic(answer)
    numbers = sorted(map(int, _INTEGERS.findall(written)))
    return written if numbers == sorted(entry["metadata"]["numbers"]) and parse_expr(written) == 24 else ""


def _expression(answer: str, entry: dict[str, Any]) -> str:
    import sympy

    symbols = {"C", entry["metadata"].get("variable")}
    return formula(answer, lambda name: name not in symbols and (hasattr(sympy, name) or hasattr(builtins, name)))


PARSED: dict[str, Callable[[str, dict[str, Any]], str]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _listed),
    "countdown": lambda answer, _entry: arithmetic(answer),
    "puzzle24": _combined,
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _expression),
}
"""Tasks whose scorers evaluate the answer -> function that returns the text to give them instead."""


def _probability(answer: str, entry: dict[str, Any]) -> str:
    """Returns the answer if it is within 0.0001 of the probability, as the task requires, and within 1 %. The task
    itself gives full marks to `0` for `0.5`, which begins with it, and for small probabilities."""
    plain, right = answer.replace(",", ""), Fraction(entry["answer"])
    try:
        given = Fraction(plain) if _PROBABILITY.fullmatch(plain) else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        return ""
    return answer if abs(given - right) <= min(Fraction(1, 10_000), right / 100) else ""


def _finite(answer: str, _entry: dict[str, Any]) -> str:
    """Returns the list of numbers if all are finite. NaN has no order and no distance from the right number."""
    try:
        numbers = json.loads(answer.replace("'", '"'))
        return answer if all(math.isfinite(float(number)) for number in numbers) else ""
    except (ValueError, TypeError, OverflowError, RecursionError):
        return ""


CHECKED: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "coin_flip": _probability,
    "complex_arithmetic": lambda answer, _entry: "" if "n" in answer.lower() else answer,  # NaN, infinity
    "game_of_life_halting": lambda answer, entry: answer if answer.lower() == entry["answer"].lower() else "",
    "number_sorting": _finite,
}
"""Tasks whose scorers give full marks to some wrong answers -> function that returns the text to score: the answer, or
an empty text if it is such a wrong answer."""
ALONE = frozenset(
    {"arc_agi", "bitwise_arithmetic", "boxnet", "calendar_arithmetic", "codeio", "number_sorting", "rearc"}
    | {"propositional_logic", "rubiks_cube", "rush_hour", "sokoban", "word_ladder"}
)
"""Tasks whose scorers do not evaluate the answer but call code that may keep state. Each answer gets its own
process."""
REFUSED = {"composite": "it hands the answer on to the scorers of other tasks: name those tasks as sets of their own"}
"""Tasks that are not scored -> reason."""


class ReasoningGym(Reward):
    """The task's own score, from 0 to 1; the task decides about partial credit. For reasoning-gym's problems only.
    Needs bubblewrap. Answers that a task would evaluate are parsed first. Scorers were checked for that in
    reasoning-gym 0.1.25; those of other versions are refused. An answer on which the task's scorer raises gets 0."""

    largest: ClassVar[float] = 1.0

    libraries: ClassVar[tuple[str, ...]] = ("reasoning-gym", "python")
    sealed: ClassVar[Literal["always"]] = "always"

    def refuses(self, source: Source) -> Issue | None:
        """See Reward."""
        if source.source == "reasoning_gym":
            task = getattr(source, "task", "")
            return _refusal(task, REFUSED[task]) if task in REFUSED else None
        return Issue(
            "reward.type reasoning_gym scores reasoning-gym's own problems only",
            given=source.source,
            hint="take another reward.type: math_verify, math_dapo or exact_match",
        )

    def prepare(self) -> None:
        """See Reward."""
        from rpg.data import reasoning_gym_imported  # noqa: F401

        _installed()  # before a process is forked for each response

    def runs(self, problem: Problem) -> bool:
        """See Reward. Most of the tasks only compare."""
        return problem.metadata["task"] in PARSED.keys() | ALONE

    def objects_to(self, problem: Problem) -> Issue | None:
        """See Reward."""
        if "entry" not in problem.metadata:
            return None  # `refuses` reports this for the source
        why = why_not(task := problem.metadata["task"], type(_task_of(problem)))
        return _refusal(task, why) if why else None

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward.

        The answer is the content of the last `<answer>` tag, which reasoning-gym's own system prompts ask for; without
        a tag it is the whole response. White space around it is ignored. The data stage wrote `problem.metadata`: task,
        config and the generator's entry.
        """
        tagged = _TAGGED.findall(response)
        extracted = (tagged[-1] if tagged else response.removeprefix(problem.prefill)).strip()
        scorer, task, entry = _task_of(problem), problem.metadata["task"], problem.metadata["entry"]
        if why := why_not(task, type(scorer)):
            raise ValueError(f"the task {task} is not scored: {why}")
        try:
            taken = (PARSED | CHECKED).get(task)
            value = float(scorer.score_answer(taken(extracted, entry) if taken else extracted, entry))
        except Exception:  # many tasks expect answers of the right form
            value = 0.0
        return Score.of(value if 0 <= value <= 1 else 0.0, extracted or None)


def why_not(task: str, scorer: type) -> str:
    """Returns the reason why a task's answers are not scored; empty if they are."""
    if task in REFUSED:
        return REFUSED[task]
    if not scorer.__module__.startswith(_LIBRARY):
        return "it is not known whether its scorer evaluates the answer as code"
    if (installed := _installed()) != CHECKED_VERSION:
        return f"its scorer was checked in reasoning-gym {CHECKED_VERSION}, and {installed} is installed"
    return ""


def _refusal(task: str, why: str) -> Issue:
    hint = "take another task" if _installed() == CHECKED_VERSION else f"pip install reasoning-gym=={CHECKED_VERSION}"
    return Issue(f"reward.type reasoning_gym does not score the task {task}", given=why, hint=hint)


@lru_cache(maxsize=1)
def _installed() -> str:
    return version("reasoning-gym")


def _task_of(problem: Problem) -> Any:
    """Returns the task's dataset, which scores. Raises ValueError if the problem comes from elsewhere."""
    origin = problem.metadata
    if "entry" not in origin:
        raise ValueError(f"problem {problem.problem_id} does not come from reasoning_gym: it has no task to score it")
    return _task(origin["task"], json.dumps(origin["config"], sort_keys=True))


@lru_cache(maxsize=64)
def _task(name: str, config: str) -> Any:
    from rpg.data.reasoning_gym_imported import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(config))
