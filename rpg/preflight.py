"""Checks a spec's data and model before anything runs: the first rows, the model, the lengths of prompts.

A stage would report the same errors in the same words, minutes later. Nothing is written and nothing is downloaded.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import TYPE_CHECKING

from rpg.base.check import check_model
from rpg.base.check_tokens import Row, check_tokens, named_rows
from rpg.base.stage import NamedModel, look_at
from rpg.base.teacher import look_at_teacher
from rpg.data.chat_template import choose_template
from rpg.data.loading import Tools, encode_prompts, rendered
from rpg.data.problems import StagedProblem
from rpg.data.prompts import check_template
from rpg.data.staging import SPLITS, check_overlap, first_problems
from specs.errors import Issue, Path, SpecError
from specs.schema.data import ChatPrompt, Data, Source
from specs.schema.experiment import Experiment
from specs.schema.model import PretrainedModel, ScratchModel
from specs.schema.reward import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = ("system", "user")
"""Roles whose messages a chat template shows completely. It may shorten earlier replies."""
FIRST_ROWS = 64
"""Number of problems of each set that are checked."""
HUB_SECONDS = 4.0
"""Longest wait for an answer of the Hub, in seconds."""
MOST_ROWS = 5000
"""Largest number of problems of a set that is read completely and compared with other sets, which takes a second or
two."""


@dataclass(slots=True)
class Findings:
    """The findings of a check of data and model. Their paths lead into the spec."""

    errors: list[Issue] = field(default_factory=list)
    """Findings that would make a stage fail."""
    absent: list[Issue] = field(default_factory=list)
    """Findings that would make a stage fail on this machine."""
    warnings: list[Issue] = field(default_factory=list)


def examine(experiment: Experiment, *, model: bool = True) -> Findings:
    """Checks the data, the model and the prompts that a spec names.

    Args:
        model: whether to check the model itself too, which loads torch. The tokenizer is always read, for the lengths
            of prompts.
    """
    findings, sets = Findings(), dict[str, list[list[StagedProblem]]]()
    for split in SPLITS:
        sets[split] = [problems for problems in _first_rows(experiment, split, findings) if problems]
    models: dict[Path, tuple[PretrainedModel | ScratchModel, NamedModel]] = {}
    try:
        policy = look_at(experiment.model, build=model)
        models["model", "path"] = experiment.model, policy
        rollouter = experiment.rollout.rollouter
        if policy.tokenizer is not None:
            choose_template(policy.tokenizer, experiment.data.prompt)
        if policy.tokenizer is not None and not rollouter.lacks():  # the tools of an unreachable server are unknown
            encoded = list(_encoded(sets, policy.tokenizer, experiment.data, rollouter.shown_tools))
            _check_lengths(encoded, experiment.data, findings)
            findings.warnings += _left_out(encoded, experiment.data)
            rows = [Row(*row) for each in encoded for row in each.rows()]
            for found in check_tokens(experiment, policy, rows):
                (findings.errors if found.fatal else findings.warnings).append(found.issue)
        if (teacher := experiment.reference.teacher) and experiment.trains:
            models["reference", "path"] = teacher, look_at_teacher(teacher, policy)
        if model:
            check_model(experiment, policy)
    except SpecError as error:
        findings.errors += error.issues
    if not findings.errors:
        findings.errors += _overlap(experiment.data)
    findings.absent += _not_here(experiment.data, models)
    return findings


def _overlap(data: Data) -> list[Issue]:
    """Returns the problems that training and evaluation sets share. Considers sets of at most MOST_ROWS problems."""
    if not (data.train and data.evaluation):
        return []
    sets: dict[str, list[tuple[Path, Source, list[StagedProblem]]]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for index, source in enumerate(getattr(data, split)):
            path = ("data", split, index)
            if not source.answered:
                continue
            problems = first_problems(source, data, path, MOST_ROWS + 1) if not source.generated else []
            if not problems or len(problems) > MOST_ROWS:  # unknown, or known only in part
                if split == "train":
                    return []
                continue
            kept = list({problem.problem_id: problem for problem in problems}.values())
            sets[split].append((path, source, kept if data.deduplicate else problems))
    try:
        check_overlap(sets, drop=data.overlap == "drop")
    except SpecError as error:
        return list(error.issues)
    return []


def _not_here(data: Data, models: Mapping[Path, tuple[PretrainedModel | ScratchModel, NamedModel]]) -> list[Issue]:
    """Returns data and models that are not on this machine and cannot be downloaded, because HF_HUB_OFFLINE forbids it,
    the Hub does not answer, or the name is that of a directory."""
    missing, issues = list[tuple[str, Path, str]](), list[Issue]()
    for path, (model, found) in models.items():
        if not isinstance(model, PretrainedModel) or found.directory is not None:
            continue
        if model.path.count("/") > 1:
            hint = "create it first, at the spec's path; a Hub id is an owner and a name"
            issues.append(Issue("no such model directory", path, model.path, hint=hint))
        else:
            missing.append(("model", path, model.path))
    for split in SPLITS:
        for index, source in enumerate(getattr(data, split)):
            if not source.is_here():
                named = "path" if getattr(source, "path", "") else "name"
                missing.append(("dataset", ("data", split, index, named), getattr(source, named)))
    if not missing or not (why := _why_no_download()):
        return issues
    hint = "download it on a machine with a network, or give the directory of a copy"
    return issues + [
        Issue(f"the {what} is not on this machine, and {why}", path, given, hint=_no_directory(path, given) + hint)
        for what, path, given in missing
    ]


def _no_directory(path: Path, given: str) -> str:
    """Returns a hint about a path that could name a directory as well as a repository of the Hub."""
    return f"there is no directory `{given}` beside the spec; " if path[-1] == "path" and "/" not in given else ""


def _why_no_download() -> str:
    """Returns why nothing can be fetched from the Hub; empty if its server answers. Any answer counts, even a
    refusal."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE forbids fetching it"
    answered = Event()

    def ask() -> None:
        with suppress(Exception):  # a dozen exception classes of three libraries mean "no connection"
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            answered.set()

    # Runs in its own thread, since the time limit of a request does not end the lookup of a host's address.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return "" if answered.is_set() else f"the Hub ({constants.ENDPOINT}) does not answer"


def _first_rows(experiment: Experiment, split: str, findings: Findings) -> Iterator[list[StagedProblem]]:
    """Yields the first problems of each set of a split that can be read and scored."""
    data = experiment.data
    for index, source in enumerate(getattr(data, split)):
        path = ("data", split, index)
        try:
            check_template(data.prompt.template)
            problems = first_problems(source, data, path, FIRST_ROWS)
        except SpecError as error:
            findings.errors += error.issues
            continue
        if not source.answered:
            continue
        reward = source.reward or experiment.reward
        if issue := next((issue for problem in problems if (issue := reward.objects_to(problem))), None):
            findings.errors.append(replace(issue, path=(*path, "reward") if source.reward else path))
        findings.warnings += _odd_rows(problems, reward, path)
        yield problems


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The first problems of a set and the tokens of their prompts."""

    split: str
    problems: list[StagedProblem]
    texts: list[str]
    """Prompts as the policy sees them."""
    prompts: list[list[int]]

    def rows(self) -> Iterator[tuple[str, list[int]]]:
        """Yields a description of each row and the tokens of its prompt."""
        for number, ids in enumerate(self.prompts):
            yield self.place(number), ids

    def place(self, number: int) -> str:
        """Returns a description of a row, counted from 0."""
        problem = self.problems[number]
        return problem.where or f"problem {number + 1} of {problem.dataset}"


def _encoded(
    sets: Mapping[str, Sequence[list[StagedProblem]]], tokenizer: "PreTrainedTokenizerBase", data: Data, tools: Tools
) -> Iterator[_Encoded]:
    for split in SPLITS:
        for problems in sets[split]:
            texts = rendered([problem.prompt for problem in problems], tokenizer, data, tools)
            yield _Encoded(split, problems, texts, encode_prompts(tokenizer, texts, data))


def _check_lengths(sets: Sequence[_Encoded], data: Data, findings: Findings) -> None:
    """Compares the prompts with the most tokens that a prompt may have. An overlong evaluation prompt is an error; an
    overlong training prompt is left out."""
    path, limit = ("data", "max_prompt_length"), data.max_prompt_length
    for each in sets:
        lengths = [len(ids) for ids in each.prompts]
        if not (too_long := [length for length in lengths if length > limit]):
            continue
        message = (
            f"{len(too_long)} of the first {len(lengths)} prompts of `{each.problems[0].dataset}` are longer than"
            f" max_prompt_length; the longest has {max(too_long)} tokens"
        )
        if each.split == "evaluation":
            findings.errors.append(Issue(message, path, str(limit), f"at least {max(too_long)}"))
        else:
            hint = "training leaves them out"
            findings.warnings.append(Issue(message, path, str(limit), hint=hint))


def _left_out(sets: Sequence[_Encoded], data: Data) -> Iterator[Issue]:
    """Yields a warning for each role whose messages the chat template leaves out or changes."""
    if not isinstance(data.prompt, ChatPrompt):
        return
    lacking: dict[str, list[str]] = {}
    for each in sets:
        for number, (problem, text) in enumerate(zip(each.problems, each.texts, strict=True)):
            for message in json.loads(problem.prompt):
                if message["role"] in _SHOWN and message["content"].strip() not in text:
                    lacking.setdefault(message["role"], []).append(each.place(number))
    for role, places in lacking.items():
        hint = "write a data.prompt.chat_template that shows these messages"
        message = f"the chat template leaves out or changes the text of {role} messages"
        yield Issue(message, ("data", "prompt"), named_rows(list(dict.fromkeys(places))), hint=hint)


def _odd_rows(problems: Sequence[StagedProblem], reward: Reward, path: Path) -> Iterator[Issue]:
    """Yields warnings about the rows of a set: answers inside prompts, and gold answers that few responses will
    match."""
    if not problems:
        return
    of = f"of the first {len(problems)} problems of `{problems[0].dataset}`"
    if answered := [problem.where for problem in problems if problem.answered]:
        hint = "take the assistant's message out of the prompt: the policy would be shown the answer"
        message = f"{len(answered)} {of} end with a message of the assistant"
        yield Issue(message, (*path, "columns", "prompt"), named_rows(answered), hint=hint)
    doubts: dict[tuple[str, str], list[StagedProblem]] = {}
    for problem in problems:
        for part in reward.parts():
            if problem.answer and (doubt := part.doubts(problem.answer)):
                doubts.setdefault((part.type, doubt), []).append(problem)
    for (kind, doubt), odd in doubts.items():
        given = f"`{odd[0].answer[:80]}`, in {named_rows([problem.where for problem in odd])}"
        hint = f"write the answers as a response gives them, or take a reward other than {kind}"
        yield Issue(f"gold answers of {len(odd)} {of} {doubt}", (*path, "columns", "answer"), given, hint=hint)
