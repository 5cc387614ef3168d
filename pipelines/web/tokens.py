"""The token browser: a filterable table of a step's responses, and one response token by token."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from pipelines.home.home import Home
from pipelines.home.unrecorded import why_incomplete
from pipelines.report.page import render
from pipelines.report.tokens import (
    COLUMNS,
    TURN_COLUMNS,
    advantage_class,
    conversation,
    shown_tokens,
    tokenizer_of,
)
from pipelines.web.pages import UnknownPageError
from storage import Store

RESPONSES_A_PAGE = 50
TOKENS_A_PAGE = 1000
_BEFORE = 16
"""Number of tokens before a page's first token that are decoded with it, because a character may begin in them."""
_MOST_CHARACTERS = 20_000
"""Largest number of characters of a prompt that are shown."""
ORDERS = {
    "place in the batch": "rollout_id",
    "highest reward": "reward DESC, rollout_id",
    "lowest reward": "reward, rollout_id",
    "most clipped": "clipped DESC NULLS LAST, rollout_id",
    "largest ratio": "highest DESC NULLS LAST, rollout_id",
    "smallest ratio": "lowest NULLS LAST, rollout_id",
    "longest": "num_tokens DESC, rollout_id",
}
_STEPS = """
    WITH steps AS (SELECT DISTINCT step FROM rollouts WHERE run_id = $run)
    SELECT coalesce($step, max(step)) AS step, min(step) AS first, max(step) AS last,
           max(step) FILTER (step < coalesce($step, (SELECT max(step) FROM steps))) AS earlier,
           min(step) FILTER (step > $step) AS later
    FROM steps
"""
_RESPONSES = """
    WITH measured AS (
        SELECT rollout_id, avg(clipped::INT) AS clipped, min(ratio) AS lowest, max(ratio) AS highest,
               avg(entropy) AS entropy
        FROM tokens WHERE run_id = $run AND step = $step AND sampled GROUP BY rollout_id
    )
    SELECT rollout_id, group_id, prompt[:160] AS prompt, response[:240] AS response, reward, advantage, num_tokens,
           finish_reason, clipped, lowest, highest, entropy, count(*) OVER () AS num_responses
    FROM rollouts LEFT JOIN measured USING (rollout_id)
    WHERE run_id = $run AND step = $step
    AND (NOT $clipped OR clipped > 0)
    AND ($ratio IS NULL OR highest >= $ratio OR lowest <= 1 / $ratio)
    AND ($reward_from IS NULL OR reward >= $reward_from) AND ($reward_to IS NULL OR reward <= $reward_to)
"""
_RESPONSE = "SELECT * FROM rollouts WHERE run_id = $run AND step = $step AND rollout_id = $rollout"
_SIBLINGS = """
    SELECT rollout_id, reward, advantage, num_tokens FROM rollouts
    WHERE run_id = $run AND step = $step AND group_id = $group ORDER BY rollout_id
"""
_TOKENS = f"""
    SELECT {COLUMNS}, count(*) OVER () AS num_tokens FROM tokens
    WHERE run_id = $run AND step = $step AND rollout_id = $rollout
    QUALIFY position BETWEEN $start AND $end ORDER BY position
"""
_TURNS = f"""
    SELECT {TURN_COLUMNS} FROM turns WHERE run_id = $run AND step = $step AND rollout_id = $rollout ORDER BY turn
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The table's selection of responses, as given in an address."""

    step: int | None = None
    """Step of the responses. None means the last step."""
    clipped: bool = False
    """Whether to show only responses with a token on which the clip acted."""
    ratio: float | None = None
    """Shows only responses that have a token whose ratio is at least this, or at most its inverse. At least 1."""
    reward_from: float | None = None
    reward_to: float | None = None
    order: str = next(iter(ORDERS))
    """Sort order of the responses, a key of ORDERS."""
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Wanted":
        """Reads the selection from the fields of the form; an empty field counts as missing.

        Raises:
            ValueError: a field has an invalid value; the message names it.
        """
        given = {name: text for name, text in query.items() if text}
        try:
            wanted = cls(
                step=int(given["step"]) if "step" in given else None,
                clipped="clipped" in given,
                **{name: float(given[name]) for name in ("ratio", "reward_from", "reward_to") if name in given},
                order=given.get("order", cls().order),
                page=int(given.get("page", 1)),
            )
        except ValueError as error:
            raise ValueError(f"not a number: {error}") from error
        if wanted.ratio is not None and not wanted.ratio >= 1:
            also = "tokens with a ratio of at most 1/ratio are also selected"
            raise ValueError(f"ratio is {wanted.ratio:g}; it must be at least 1 ({also})")
        if wanted.order not in ORDERS:
            raise ValueError(f"order: {wanted.order!r}; allowed: {', '.join(ORDERS)}")
        if wanted.page < 1 or abs(wanted.page) > 2**31 or abs(wanted.step or 0) > 2**31:
            raise ValueError("page or step: out of range")
        return wanted

    def query(self, **changes: Any) -> str:
        """Returns the query part of the address for this selection, with these changes."""
        fields = asdict(replace(self, **changes)) | ({"clipped": "on"} if self.clipped else {"clipped": None})
        return urlencode({name: value for name, value in fields.items() if value is not None})


def responses_page(home: Home, run_id: str, wanted: Wanted) -> str:
    """Returns the table of a step's responses.

    Raises:
        UnknownPageError: the home has no such run.
        RpgError: no run can have that name.
    """
    _require(home, run_id)
    with Store.open(home.root) as store:
        (steps,) = store.query(_STEPS, {"run": run_id, "step": wanted.step}).table.to_pylist()
        values = asdict(wanted) | {"run": run_id, "step": steps["step"], "most": RESPONSES_A_PAGE}
        values["start"] = (wanted.page - 1) * RESPONSES_A_PAGE
        del values["order"], values["page"]
        query = f"{_RESPONSES} ORDER BY {ORDERS[wanted.order]} LIMIT $most OFFSET $start"
        responses = store.query(query, values).table.to_pylist()
    return render(
        "responses.html",
        run_id=run_id,
        steps=steps,
        wanted=wanted,
        orders=list(ORDERS),
        responses=responses,
        num_responses=responses[0]["num_responses"] if responses else 0,
        why_no_responses=why_incomplete(home.run(run_id), "rollouts"),
        num_pages=-(-responses[0]["num_responses"] // RESPONSES_A_PAGE) if responses else 0,
    )


def response_page(home: Home, run_id: str, step: int, rollout_id: int, start: int = 0) -> str:
    """Returns one response with its tokens from position `start` on.

    Raises:
        UnknownPageError: no such response is recorded.
        RpgError: no run can have that name.
    """
    _require(home, run_id)
    response = {"run": run_id, "step": step, "rollout": rollout_id}
    with Store.open(home.root) as store:
        found = store.query(_RESPONSE, response).table.to_pylist()
        if not found:
            raise UnknownPageError(f"runs/{run_id}/tokens/{step}/{rollout_id}")
        end = start + TOKENS_A_PAGE
        window = {"start": start - _BEFORE, "end": end - 1}
        tokens = store.query(_TOKENS, response | window).table.to_pylist()
        turns = store.query(_TURNS, response).table.to_pylist()
        group = {"run": run_id, "step": step, "group": found[0]["group_id"]}
        siblings = store.query(_SIBLINGS, group).table.to_pylist()
    before = [token["token_id"] for token in tokens if token["position"] < start]
    tokenizer = tokenizer_of(home, run_id)
    shown = shown_tokens(tokens[len(before) :], tokenizer, before)
    return render(
        "response.html",
        run_id=run_id,
        response=found[0],
        prompt=found[0]["prompt"][:_MOST_CHARACTERS],
        advantage_class=advantage_class(found[0]["advantage"]),
        siblings=siblings,
        tokens=shown,
        turns=conversation(turns, shown, start),
        has_texts=tokenizer is not None,
        start=start,
        num_tokens=tokens[0]["num_tokens"] if tokens else 0,
        tokens_a_page=TOKENS_A_PAGE,
        why_no_tokens=why_incomplete(home.run(run_id), "tokens"),
    )


def _require(home: Home, run_id: str) -> None:
    if not (home.run(run_id) / "run.json").is_file():
        raise UnknownPageError(f"runs/{run_id}")
