"""What judges said, kept by what they were asked, so that the same question has the same verdict again."""

import hashlib
import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specs.machine.files import DiskError, create_json, read_json


@dataclass(frozen=True, slots=True)
class Verdict:
    """One reply of a judge. The same question has the same one, so it says nothing of when it was asked."""

    judge: str
    """Name or directory of the model."""
    vote: int
    """From 0, among the replies to the same question."""
    text: str
    """The whole reply."""
    score: float | None
    """What was read from it: a number of the scale; of two answers 1 where this response is the better one, 0.5, or 0;
    of a group from 1 for the best to 0 for the last. None: nothing could be read."""
    error: str | None
    """Why nothing could be read."""
    prompt_tokens: int
    """Tokens of the question, as the service counts them; 0 where it does not."""
    tokens: int
    """Tokens of the reply."""
    cost: float
    """In the currency of the spec's price; 0 without one."""
    key: str
    """Names the question in its own lines."""
    place: int = 0
    """Where the response stood among the answers of the question, from 0."""


_VERDICTS = TypeAdapter(list[Verdict])
_LARGEST = 2**31
"""The record's whole numbers are below it."""


def check_verdicts(said: str | None) -> None:
    """Raises ValueError where a text is no JSON list of verdicts, as the view `verdicts` reads them."""
    try:
        verdicts = _VERDICTS.validate_json(said or "", strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = " ".join([*map(str, first["loc"]), first["msg"]])
        raise ValueError(f"verdicts is not a JSON list of verdicts: {why}"[:300]) from None
    for verdict in verdicts:
        counts = (verdict.vote, verdict.prompt_tokens, verdict.tokens, verdict.place)
        if not all(0 <= count < _LARGEST for count in counts):
            raise ValueError(f"a verdict's vote, place and tokens are {counts}; allowed: 0 to {_LARGEST - 1}")
        if not all(map(math.isfinite, (verdict.cost, verdict.score or 0.0))):
            raise ValueError(f"a verdict's score and cost are {(verdict.score, verdict.cost)}; allowed: finite numbers")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge said, and what it took."""

    text: str
    prompt_tokens: int = 0
    tokens: int = 0
    cost: float = 0.0


class KeptReplies:
    """Replies in a directory that runs share: a file each, whole or not there.

    A directory that cannot be written or read costs the verdicts their memory, and no run.
    """

    def __init__(self, directory: Path | None) -> None:
        """`directory`: None keeps nothing."""
        self._directory = directory
        self._untold = Lock()
        """Held for good by whoever says that replies are not kept: many threads ask a judge at once."""

    def read(self, asked: dict[str, Any]) -> Reply | None:
        """The reply to what was asked; None where there is none."""
        if self._directory is None:
            return None
        file = self._file(asked)
        try:
            found = read_json(file)
            reply = Reply(**found["reply"]) if found else None
        except (OSError, ValueError, TypeError, KeyError):  # damaged, or of another hand: asked again
            return None
        if reply:
            with suppress(OSError):  # in a directory that is only read nothing is freed either
                os.utime(file)  # `rpg gc` frees what was not said for long
        return reply

    def write(self, asked: dict[str, Any], reply: Reply) -> Reply:
        """Keeps a reply. Returns the one that is kept: another process may have had one first."""
        if self._directory is None:
            return reply
        file = self._file(asked)
        try:
            create_json(file, {"asked": asked, "reply": asdict(reply)})
        except FileExistsError:
            if (kept := self.read(asked)) is not None:
                return kept
            file.unlink(missing_ok=True)  # damaged: the next one is kept
        except (OSError, DiskError, ValueError) as error:
            if self._untold.acquire(blocking=False):
                print(f"verdicts are not kept: {self._directory}: {error}", file=sys.stderr, flush=True)
        return reply

    def _file(self, asked: dict[str, Any]) -> Path:
        assert self._directory is not None
        text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._directory / digest[:2] / f"{digest[2:]}.json"
