"""A response as a page shows it: its turns, the speaker of each, and its tokens, coloured by ratio and entropy."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.home.home import Home
from specs.machine.files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RATIO_LEVELS = (1.01, 1.05, 1.2, 1.6)
"""Thresholds of stronger colours for a ratio above 1, and for the inverse of a ratio below 1."""
ENTROPY_LEVELS = (0.1, 0.5, 1.0, 2.0)
"""Thresholds of stronger colours for entropy, nats."""
ADVANTAGE_LEVELS = (0.001, 0.25, 0.5, 1.0)
"""Thresholds of stronger colours for the size of the advantage, reward units."""
COLUMNS = "position, token_id, logprob, old_logprob, ratio, clipped, entropy, sampled"
"""Columns of the table `tokens` that `shown_tokens` reads."""
TURN_COLUMNS = "turn, sampled, tool, text, num_tokens, reward, error, seconds, restart"
"""Columns of the table `turns` that `conversation` reads."""
_MOST_OF_A_TURN = 2000
"""Largest number of characters that are shown of a turn without recorded tokens."""
_MOST_OF_A_NAME = 60
"""Largest number of characters that are shown of a tool's name."""
_UNFINISHED = "▫"
"""Shown for a token whose bytes are the beginning of a character that a later token completes."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of a response on a page."""

    text: str
    classes: str
    """Classes of the style sheet, which show the strength of its colours, whether a clip acted on the token, and
    whether the policy sampled it."""
    about: str
    """The token's numbers, shown on hover."""


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One turn of a response."""

    number: int
    """Index in the response, from 0."""
    sampled: bool
    speaker: str
    """policy, environment, or tool with its name, which the policy wrote."""
    facts: str
    """Text that says whether it was sampled or given, its length, its reward and the tool's time."""
    error: str
    """Error with which a call was answered; empty without an error."""
    text: str
    """The turn's tokens as text, including special tokens."""
    tokens: Sequence[ShownToken] = ()
    """Those of the turn's tokens that are shown. If no tokens are recorded, this is empty, and the text is shown."""

    @property
    def excerpt(self) -> str:
        """Returns the beginning of the text."""
        cut = len(self.text) > _MOST_OF_A_TURN
        return f"{self.text[:_MOST_OF_A_TURN]} …" if cut else self.text


def shown_tokens(
    tokens: Sequence[Mapping[str, Any]], tokenizer: "Tokenizer | None", before: Sequence[int] = ()
) -> list[ShownToken]:
    """Returns the tokens with their texts.

    Args:
        tokens: rows with COLUMNS, in the order of their positions.
        tokenizer: the policy's; without one a token's text is its id.
        before: ids of the tokens before the first, on which its text may depend.
    """
    ids = [token["token_id"] for token in tokens]
    texts = _texts(tokenizer, ids, before) if tokenizer else [f"{token_id} " for token_id in ids]
    return [ShownToken(text, _classes(token), _about(token)) for text, token in zip(texts, tokens, strict=True)]


def conversation(
    turns: Sequence[Mapping[str, Any]], tokens: Sequence[ShownToken] = (), first: int = 0
) -> list[ShownTurn]:
    """Returns the turns of a response with their tokens. If only some of the tokens are shown, returns only their
    turns.

    Args:
        turns: rows with TURN_COLUMNS, in order; empty in an environment of a single turn.
        tokens: consecutive tokens of the response; empty if they are not recorded.
        first: position of the first of them.
    """
    shown, begin = [], -first
    for place, turn in enumerate(turns):
        end = begin + turn["num_tokens"]
        its_tokens = tokens[max(begin, 0) : max(end, 0)]
        is_empty = begin == end and 0 <= begin <= len(tokens)
        if its_tokens or is_empty or not tokens:
            shown.append(_shown_turn(turn, _called_in(turns, place), its_tokens))
        begin = end
    return shown


def advantage_class(advantage: float) -> str:
    """Returns the style class of a whole response, by its advantage. All its tokens share it."""
    level = bisect_right(ADVANTAGE_LEVELS, abs(advantage))
    return f"{'p' if advantage > 0 else 'm'}{level}" if level else ""


def tokenizer_of(home: Home, run_id: str) -> "Tokenizer | None":
    """Returns the tokenizer of a run's base model, or the one saved with its weights; None if neither is on this
    machine."""
    run = home.run(run_id)
    fingerprint = read_json(run / "run.json").get("fingerprints", {}).get("base", "")
    kept: Iterable[Path] = [home.artifact("base", fingerprint)] if fingerprint else []
    places = [*kept, *sorted(run.glob("weights/step-*"), reverse=True)]
    file = next((file for place in places if (file := place / "tokenizer.json").is_file()), None)
    return _load(file) if file else None


@lru_cache(maxsize=4)
def _load(path: Path) -> "Tokenizer | None":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises plain Exception for a file it cannot read
        return None


def _texts(tokenizer: "Tokenizer", token_ids: Sequence[int], before: Sequence[int]) -> list[str]:
    """Returns the text that each token adds. Special tokens are shown by name."""
    from tokenizers.decoders import DecodeStream

    # The tokens before are decoded too, one by one: together they would hide a character that they only begin.
    stream, texts = DecodeStream(skip_special_tokens=False), []
    for token_id in (*before, *token_ids):
        try:
            text = stream.step(tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            # The bytes so far are not UTF-8. The stream cannot skip them, so a new one decodes from this token on.
            stream = DecodeStream(skip_special_tokens=False)
            text = stream.step(tokenizer, token_id)
        texts.append(_UNFINISHED if text is None else text.replace("\n", "↵\n"))
    return texts[len(before) :]


def _classes(token: Mapping[str, Any]) -> str:
    """Returns the token's classes: u and d for ratios above and below 1, e for entropy. The names are short, because a
    page has thousands of tokens."""
    classes = []
    ratio, entropy = token["ratio"], token["entropy"]
    if ratio is not None and ratio > 0 and (level := bisect_right(RATIO_LEVELS, max(ratio, 1 / ratio))):
        classes.append(f"{'u' if ratio > 1 else 'd'}{level}")
    if entropy is not None and (level := bisect_right(ENTROPY_LEVELS, entropy)):
        classes.append(f"e{level}")
    if token["clipped"]:
        classes.append("clipped")
    if not token["sampled"]:
        classes.append("given")
    return " ".join(classes)


def _about(token: Mapping[str, Any]) -> str:
    parts = [f"token {token['position']}, id {token['token_id']}"]
    if not token["sampled"]:
        return f"{parts[0]} · given, not sampled"
    for name in ("ratio", "entropy", "logprob", "old_logprob"):
        if token[name] is not None and math.isfinite(token[name]):
            parts.append(f"{name} {token[name]:.4g}")
    return " · ".join([*parts, *(["clipped"] if token["clipped"] else [])])


def _called_in(turns: Sequence[Mapping[str, Any]], place: int) -> list[str]:
    """Returns the tools that one of the policy's turns calls."""
    called: list[str] = []
    for answer in turns[place + 1 :]:
        if answer["sampled"] or answer["tool"] is None:
            break
        called.append(_name(answer["tool"]))
    return called if turns[place]["sampled"] else []


def _name(tool: str) -> str:
    """Returns a tool's name on one short line. The policy may have written any text as the name."""
    return " ".join(tool.split())[:_MOST_OF_A_NAME] or "(no name)"


def _shown_turn(turn: Mapping[str, Any], called: Sequence[str], tokens: Sequence[ShownToken]) -> ShownTurn:
    number = turn["num_tokens"]
    facts = [f"{number:,} {'token' if number == 1 else 'tokens'} {'sampled' if turn['sampled'] else 'given'}"]
    if called:
        facts.append(f"calls {', '.join(called)}")
    if turn.get("restart"):
        facts.append("a new context: from here on the policy sees nothing above")
    if turn["reward"] is not None:
        facts.append(f"reward of the turn {turn['reward']:.3g}")
    if turn["seconds"] is not None:
        facts.append(f"{turn['seconds']:.2g} s" if turn["seconds"] >= 0.001 else "under 1 ms")
    given_by = "environment" if turn["tool"] is None else f"tool {_name(turn['tool'])}"
    speaker = "policy" if turn["sampled"] else given_by
    return ShownTurn(
        turn["turn"], turn["sampled"], speaker, " · ".join(facts), turn["error"] or "", turn["text"], tokens
    )
