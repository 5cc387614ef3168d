"""How a process of ours ends before it is done: its exit code, and the one word for the cause.

A process that can leaves the cause, or the user's mistakes, in a file for whoever started it; of one that could not,
the words it printed tell. Needs no torch: whoever waits for a trainer uses it too.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from specs.errors import Issue, read_issue
from specs.secrets import hide

USER_ERROR = 2
"""Exit code: what the user gave is wrong; `leave_issues` has said how."""
STOPPED = 143
"""Exit code of a trainer that was asked to stop and has saved its state: 128 + SIGTERM."""
SIGNALLED = 128
"""Exit codes above it are 128 + the signal that ended the process, as a shell has them."""

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
"""out_of_memory: of a GPU or the host. sampler_out_of_memory: so while sampling. diverged: a guard ended it, or a
gradient that is not finite. lost_peer: a rank died, or the others no longer hear it. preempted: SIGTERM from elsewhere,
state saved. user_error: what the user gave is wrong. disk_full: nothing can be written. hung: longer than its time
limit. reward_failed: most responses of the first step could not be scored, by the reward's own fault. reward_away: so
since a service that it asks did not answer. program_error: an exception that the same inputs raise again, such as an
index out of range. stopped: as the user asked."""

RETRIED = frozenset({"out_of_memory", "lost_peer", "preempted", "hung", "reward_away", "other"})
"""Causes after which another attempt may go better; out_of_memory once, with smaller microbatches: they are the
learner's alone."""

_WORDS: tuple[tuple[Cause, str], ...] = (
    # Before the others: the words of a reward's own exception come behind.
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
    # Where a traceback names it, at the beginning of a line.
    (
        "program_error",
        r"(?m)^(Index|Key|Type|Attribute|Name|Value|NotImplemented|Assertion|ZeroDivision|Import|ModuleNotFound)Error\b|"
        r"device-side assert triggered",
    ),
)
"""The first pattern that fits gives the cause."""


def cause_in(text: str) -> Cause:
    """The cause that the words of an error or of a log give."""
    return next((cause for cause, pattern in _WORDS if re.search(pattern, text)), "other")


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception; where its own words do not tell, that of the exception that it was raised from."""
    own = cause = cause_in(f"{type(error).__name__}: {error}")
    while cause in ("other", "program_error") and error.__cause__ is not None:
        error = error.__cause__
        cause = cause_in(f"{type(error).__name__}: {error}")
    return own if cause == "other" else cause


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """How a process ended before it was done."""

    cause: Cause
    message: str = ""
    """Its own words; empty where it left none."""
    microbatch_tokens: int = 0
    """Tokens of the largest microbatch that it tried, padding included; 0: not known."""


def note_exit(run_dir: Path, early: EarlyExit) -> None:
    """Leaves a rank's end in the run's directory, as far as that is possible now; its first note stays."""
    from specs.machine.files import DiskError, write_json

    path = run_dir / "exits" / f"rank-{int(os.environ.get('RANK', '0')):05}.json"
    try:
        if not path.exists():
            write_json(path, asdict(replace(early, message=hide(early.message))), durable=False)
    except (OSError, MemoryError, DiskError):  # what it printed tells as well
        return


def noted_exits(run_dir: Path) -> list[EarlyExit]:
    """Notes of the ranks on how they ended, in their order; a note that is not whole is left out."""
    exits = []
    for path in sorted((run_dir / "exits").glob("rank-*.json")):
        with suppress(OSError, ValueError, TypeError):
            exits.append(EarlyExit(**json.loads(path.read_bytes())))
    return exits


def forget_exits(run_dir: Path) -> None:
    """Removes the notes of an earlier attempt: they would be taken for those of the next one."""
    shutil.rmtree(run_dir / "exits", ignore_errors=True)


def leave_issues(path: Path, issues: Sequence[Issue]) -> None:
    """Writes what is wrong with what the user gave, for the one who started this process."""
    path.write_text(hide(json.dumps([asdict(issue) for issue in issues])), encoding="utf-8")


def read_issues(path: Path) -> list[Issue]:
    """Issues that a process left with `leave_issues`; empty where it left nothing readable."""
    try:
        return [read_issue(plain) for plain in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError):
        return []
