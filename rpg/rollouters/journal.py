"""Journal of the answers of environments, which might be different the next time. They are on disk before the policy
continues from them.

The next attempt samples an interrupted step again. It finds here the answers that the policy got, and so samples the
same responses. An entry is valid only after the same tokens. Once the step has a checkpoint, its entries are deleted.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

from specs.machine.files import sync

DIRECTORY = "answers"
"""Name of the journal's directory in a run's directory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text that an environment gives to the policy between two of its turns."""

    tool: str
    """Name of the tool that answers, as the policy called it; empty if no tool does."""
    text: str
    error: str = ""
    """Why a call has no other answer; empty if it was answered."""
    seconds: float = 0.0
    """Wall time of the answer, seconds."""
    reward: float = 0.0
    """Reward of the turn that it answers, in reward units."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The recorded answers to one turn."""

    answers: tuple[Answer, ...]
    pause: int
    """Number of the sampler's pause in which the answers were given. It decides which responses are decoded
    together."""


Key = tuple[int, int, int, str]
"""Seed of the prompt, member, turn, and digest of all tokens before the answers."""


class Journal:
    """A directory for each step, with a file for each process that samples. Safe to use from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"{uuid4().hex}.jsonl"
        self._lock = threading.Lock()
        self._files: dict[int, IO[bytes]] = {}
        self._known: dict[int, dict[Key, Kept]] = {}
        for file in sorted(directory.glob("*/*.jsonl")):
            if file.parent.name.isdecimal():
                self._known.setdefault(int(file.parent.name), {}).update(_entries(file))

    def of_prompt(self, step: int, seed: int) -> "PromptJournal":
        """Returns the part of the journal for one prompt of a step."""
        return PromptJournal(self, step, seed)

    def recall(self, step: int, key: Key) -> Kept | None:
        """Returns the answers that an earlier attempt kept under this key; None if there is no entry."""
        with self._lock:
            return self._known.get(step, {}).get(key)

    def keep(self, step: int, key: Key, kept: Kept) -> None:
        """Writes answers. They are on disk after `sync`."""
        line = json.dumps([*key, kept.pause, [astuple(answer) for answer in kept.answers]])
        with self._lock:
            self._file(step).write(line.encode() + b"\n")

    def sync(self, step: int) -> None:
        """Waits until the entries of a step are on disk."""
        with self._lock:
            os.fsync(self._file(step).fileno())

    def forget(self, up_to: int, *, delete: bool) -> None:
        """Forgets the steps up to this one. With `delete`, which one rank sets for all, also deletes them from disk."""
        with self._lock:
            for step in [step for step in self._known if step <= up_to]:
                del self._known[step]
            for step in [step for step in self._files if step <= up_to]:
                self._files.pop(step).close()
        if delete and self._directory.is_dir():
            for entry in self._directory.iterdir():
                if entry.name.isdecimal() and int(entry.name) <= up_to:
                    shutil.rmtree(entry, ignore_errors=True)  # files that another rank holds are deleted next time
            with suppress(OSError):  # the directory still has later steps
                self._directory.rmdir()

    def close(self) -> None:
        """Closes the files without deleting them."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _file(self, step: int) -> IO[bytes]:
        if step not in self._files:
            directory = self._directory / f"{step:06}"
            directory.mkdir(parents=True, exist_ok=True)
            self._files[step] = (directory / self._name).open("ab", buffering=0)
            for each in (directory, self._directory, self._directory.parent):
                sync(each)
        return self._files[step]


@dataclass(frozen=True, slots=True)
class PromptJournal:
    """The journal of one prompt of a step."""

    journal: Journal
    step: int
    seed: int

    def recall(self, member: int, turn: int, context: Sequence[int]) -> Kept | None:
        """Returns the answers that an earlier attempt gave to this turn after these tokens; None if there is no
        entry."""
        return self.journal.recall(self.step, self._key(member, turn, context))

    def keep(self, member: int, turn: int, context: Sequence[int], kept: Kept) -> None:
        """Writes answers. They are on disk after `sync`. No response continues from them before that."""
        self.journal.keep(self.step, self._key(member, turn, context), kept)

    def sync(self) -> None:
        """Waits until the answers to all prompts of the step are on disk."""
        self.journal.sync(self.step)

    def _key(self, member: int, turn: int, context: Sequence[int]) -> Key:
        return self.seed, member, turn, hashlib.sha256(repr(tuple(context)).encode()).hexdigest()


class Unkept:
    """A journal that keeps nothing. It is for evaluation, whose answers are measured once and not trained on."""

    def recall(self, member: int, turn: int, context: Sequence[int]) -> Kept | None:  # noqa: ARG002
        """Returns None, because there are no entries."""
        return None

    def keep(self, member: int, turn: int, context: Sequence[int], kept: Kept) -> None:
        """Does nothing."""

    def sync(self) -> None:
        """Does nothing."""


def _entries(file: Path) -> dict[Key, Kept]:
    """Returns the entries of a file. A line that a kill cut off was never used and is skipped."""
    found: dict[Key, Kept] = {}
    for line in file.read_bytes().splitlines():
        try:
            seed, member, turn, context, pause, answers = json.loads(line)
            found[seed, member, turn, context] = Kept(tuple(Answer(*answer) for answer in answers), pause)
        except (ValueError, TypeError):
            break
    return found
