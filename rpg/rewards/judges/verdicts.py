"""Storage of judges' verdicts by question, so that the same question gets the same verdict again."""

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
    """One reply of a judge. It does not record the time, because the same question always has the same reply."""

    judge: str
    """Name or directory of the model."""
    vote: int
    """Number of the vote on the same question, from 0."""
    text: str
    """The whole reply."""
    score: float | None
    """Score that was read from the reply: a number on the scale; for a pair, 1 for the better response, 0.5 for a tie,
    else 0; for a group, from 1 for the best to 0 for the last. None if nothing could be read."""
    error: str | None
    """Why nothing could be read; None if a score was read."""
    prompt_tokens: int
    """Number of tokens of the question, as the service counts them; 0 if it does not count them."""
    tokens: int
    """Tokens of the reply."""
    cost: float
    """Cost in the currency of the spec's price; 0 without a price."""
    key: str
    """Key that marks the question's own lines."""
    place: int = 0
    """Position of the response among the answers of the question, from 0."""


_VERDICTS = TypeAdapter(list[Verdict])
_LARGEST = 2**31
"""The record's whole numbers are below this."""


def check_verdicts(said: str | None) -> None:
    """Raises ValueError unless a text is a JSON list of verdicts in the form that the view `verdicts` reads."""
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
    """A judge's reply, with its tokens and cost."""

    text: str
    prompt_tokens: int = 0
    tokens: int = 0
    cost: float = 0.0


class KeptReplies:
    """Replies in a directory that runs share. Each reply is a file that is either complete or absent.

    If the directory cannot be written or read, verdicts are not kept; no run fails.
    """

    def __init__(self, directory: Path | None) -> None:
        """Sets the directory. None means that nothing is kept."""
        self._directory = directory
        self._untold = Lock()
        """Lock that makes sure that only one of many threads reports that replies cannot be kept. It is never
        released."""

    def read(self, asked: dict[str, Any]) -> Reply | None:
        """Returns the kept reply to a question; None if it is new."""
        if self._directory is None:
            return None
        file = self._file(asked)
        try:
            found = read_json(file)
            reply = Reply(**found["reply"]) if found else None
        except (OSError, ValueError, TypeError, KeyError):  # damaged, or written by something else: asked again
            return None
        if reply:
            with suppress(OSError):  # a read-only directory also frees nothing
                os.utime(file)  # `rpg gc` frees replies that were not used for long
        return reply

    def write(self, asked: dict[str, Any], reply: Reply) -> Reply:
        """Keeps a reply. Returns the kept reply, which may be another process's if that was first."""
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
