"""Why a process of ours ended before it was done: one word, told from the exception or from what was said of it.

The trainer leaves the word where the one who started it finds it; of a process that could not, the words it printed
tell. Needs no torch: whoever waits for a trainer uses it too.
"""

import os
import re
from pathlib import Path
from typing import Any, Literal

Cause = Literal[
    "out_of_memory",
    "sampler_out_of_memory",
    "diverged",
    "lost_peer",
    "preempted",
    "user_error",
    "disk_full",
    "hung",
    "stopped",
    "other",
]
"""out_of_memory: of a GPU or the host. sampler_out_of_memory: so while sampling. diverged: a guard ended it, or a
gradient that is no number. lost_peer: a rank died, or the others no longer hear it. preempted: SIGTERM from elsewhere,
state saved. user_error: what the user gave is wrong. disk_full: nothing can be written. hung: longer than its time
limit. stopped: as the user asked."""

RETRIED = frozenset({"out_of_memory", "lost_peer", "preempted", "hung", "other"})
"""Causes after which another attempt may go better; out_of_memory once, with smaller microbatches: they are the
learner's alone."""

_SAID: tuple[tuple[Cause, str], ...] = (
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
)


def cause_said(text: str) -> Cause:
    """The cause that an error's words give."""
    return next((cause for cause, pattern in _SAID if re.search(pattern, text)), "other")


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception; that of what it came from where its own words do not tell."""
    while True:
        found = cause_said(f"{type(error).__name__}: {error}")
        if found != "other" or error.__cause__ is None:
            return found
        error = error.__cause__


def note(run_dir: Path, cause: Cause, message: str, *, microbatch_tokens: int = 0) -> None:
    """Leaves a rank's cause in the run's directory, as far as that is possible now.

    Args:
        microbatch_tokens: the largest pass that was tried, padding included; 0: not known.
    """
    from rpg.files import DiskError, replace_json

    record: dict[str, Any] = {"cause": cause, "message": message, "microbatch_tokens": microbatch_tokens}
    path = run_dir / "exits" / f"rank-{int(os.environ.get('RANK', '0')):05}.json"
    try:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            replace_json(path, record, durable=False)
    except (OSError, MemoryError, DiskError):  # what it printed tells as well
        return
