"""Premature ends of our processes, described by the exit code and one word for the cause.

A process writes the cause, or the user's mistakes, into a file for the process that started it. If it could not, its
printed output is searched. The module needs no torch, since the process that waits for a trainer uses it too.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from specs.errors import Issue, read_issue
from specs.secrets import hide

USER_ERROR = 2
"""Exit code: the user's input is wrong; `leave_issues` has recorded the issues."""
STOPPED = 143
"""Exit code of a trainer that was asked to stop and has saved its state: 128 + SIGTERM."""
SIGNALLED = 128
"""Exit codes above this are 128 + the number of the signal that ended the process, as in a shell."""

Cause = Literal[
    "out_of_memory",
    "sampler_out_of_memory",
    "diverged",
    "lost_peer",
    "preempted",
    "user_error",
    "disk_full",
    "hung",
    "reward_failed",
    "reward_away",
    "program_error",
    "stopped",
    "other",
]
"""out_of_memory: on a GPU or the host. sampler_out_of_memory: the same while sampling. diverged: ended by a guard, or
by a gradient that is not finite. lost_peer: a rank died, or the others lost the connection to it. preempted: SIGTERM
from outside, state saved. user_error: the user's input is wrong. disk_full: nothing can be written. hung: over its time
limit. reward_failed: most responses of the first step could not be scored, by the reward's own fault. reward_away: the
same, because a service that the reward asks did not answer. program_error: an exception that the same inputs raise
again, such as an index out of range. stopped: at the user's request."""

RETRIED = frozenset({"out_of_memory", "lost_peer", "preempted", "hung", "reward_away", "other"})
"""Retryable causes. out_of_memory is retried once, with smaller microbatches. The sampler has none, so
sampler_out_of_memory is not retried."""

_WORDS: tuple[tuple[Cause, str], ...] = (
    # Before the others, since the words of the reward's own exception follow in the same text.
    ("reward_failed", r"RewardFailedError"),
    ("reward_away", r"RewardAwayError"),
    ("sampler_out_of_memory", r"SamplerOutOfMemoryError"),
    (
        "out_of_memory",
        r"MemoryError|OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|std::bad_alloc",
    ),
    ("disk_full", r"DiskError|No space left on device|Disk quota exceeded|no space is left on the device"),
    ("diverged", r"DivergedError|GuardStoppedError"),
    (
        "lost_peer",
        r"DistBackendError|DistNetworkError|Connection (closed|reset|refused)( by peer)?|Timed out waiting|NCCL|"
        r"Broken pipe.*gloo|gloo.*(timeout|Timeout)|heartbeat",
    ),
    # The name of the exception at the beginning of a line, as in a traceback.
    (
        "program_error",
        r"(?m)^(Index|Key|Type|Attribute|Name|Value|NotImplemented|Assertion|ZeroDivision|Import|ModuleNotFound)Error\b|"
        r"device-side assert triggered",
    ),
)
"""Cause -> pattern. The first pattern that matches gives the cause."""


_WATCHDOG = re.compile(r"\[rank(\d+)\]:.*Watchdog caught collective operation timeout")
"""NCCL's message in a rank whose wait for the others timed out. NCCL then aborts the rank's process."""


def absent_ranks(waited: Iterable[int], ranks: int, seconds: float) -> str:
    """Returns a sentence that names the ranks that did not arrive at a collective.

    Args:
        waited: ranks whose wait timed out.
        ranks: number of all ranks.
        seconds: the time limit.
    """
    absent = sorted({*range(ranks)}.difference(waited))
    who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else "a rank that waits too"
    why = "" if absent else ": the network between the ranks lost it"
    return f"{who} did not arrive at a collective within {seconds:g} s (launcher.collective_timeout_seconds){why}"


def ranks_that_waited(output: str) -> set[int]:
    """Returns the ranks whose NCCL collective timed out, by their output; empty if none did."""
    return {int(rank) for rank in _WATCHDOG.findall(output)}


def cause_in(text: str) -> Cause:
    """Returns the cause that the text of an error or of a log indicates."""
    return next((cause for cause, pattern in _WORDS if re.search(pattern, text)), "other")


def cause_of(error: BaseException) -> Cause:
    """Returns the cause of an exception. If its own text does not show it, returns the cause of the exception that it
    was raised from."""
    own = cause = cause_in(f"{type(error).__name__}: {error}")
    while cause in ("other", "program_error") and error.__cause__ is not None:
        error = error.__cause__
        cause = cause_in(f"{type(error).__name__}: {error}")
    return own if cause == "other" else cause


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Record of a process that ended before it was done."""

    cause: Cause
    message: str = ""
    """The process's own message; empty if it left none."""
    microbatch_tokens: int = 0
    """Number of tokens, including padding, of the largest microbatch that the process tried; 0 if not known."""


def note_exit(run_dir: Path, early: EarlyExit) -> None:
    """Records a rank's end in the run's directory, if that is still possible. Only the rank's first note counts."""
    from specs.machine.files import DiskError, write_json

    path = run_dir / "exits" / f"rank-{int(os.environ.get('RANK', '0')):05}.json"
    try:
        if not path.exists():
            write_json(path, asdict(replace(early, message=hide(early.message))), durable=False)
    except (OSError, MemoryError, DiskError):  # its printed output has the cause as well
        return


def noted_exits(run_dir: Path) -> list[EarlyExit]:
    """Returns the ranks' notes on their ends, in the order of the ranks. Incomplete notes are left out."""
    exits = []
    for path in sorted((run_dir / "exits").glob("rank-*.json")):
        with suppress(OSError, ValueError, TypeError):
            exits.append(EarlyExit(**json.loads(path.read_bytes())))
    return exits


def forget_exits(run_dir: Path) -> None:
    """Removes the notes of an earlier attempt, which would be read as those of the next one."""
    shutil.rmtree(run_dir / "exits", ignore_errors=True)


def leave_issues(path: Path, issues: Sequence[Issue]) -> None:
    """Writes issues in the user's input to a file, for the process that started this one."""
    path.write_text(hide(json.dumps([asdict(issue) for issue in issues])), encoding="utf-8")


def read_issues(path: Path) -> list[Issue]:
    """Returns the issues that a process wrote with `leave_issues`; empty if there is no readable file."""
    try:
        return [read_issue(plain) for plain in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError):
        return []
