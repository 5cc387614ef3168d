"""Responses of a run's training or evaluation for a terminal: prompt, turns, and the speaker of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.cli.output import as_objects
from pipelines.home.home import Home
from pipelines.report.tokens import TURN_COLUMNS, conversation
from specs.errors import RpgError

_LAST_STEP = "SELECT max(step) AS step FROM rollouts WHERE run_id = $run"
# Texts are read separately, and only those of the selected responses: those of a step may be gigabytes.
_CHOSEN = """
    SELECT rollout_id FROM rollouts WHERE run_id = $run AND step = $step
    AND ($response IS NULL OR rollout_id = $response)
    QUALIFY $response IS NOT NULL OR row_number() OVER (ORDER BY reward DESC, rollout_id) = 1
        OR row_number() OVER (ORDER BY reward, rollout_id DESC) = 1
    ORDER BY reward DESC, rollout_id
"""
_RESPONSE = """
    SELECT step, rollout_id, group_id, prompt, response, reward, advantage, num_tokens, finish_reason, reward_error
    FROM rollouts WHERE run_id = $run AND step = $step AND rollout_id = $rollout
"""
_TURNS = f"""
    SELECT {TURN_COLUMNS} FROM turns WHERE run_id = $run AND step = $step AND rollout_id = $rollout ORDER BY turn
"""
_EVALUATED_STEPS = """
    SELECT max(step) FILTER (dataset = $dataset) AS step, list(DISTINCT dataset ORDER BY dataset) AS datasets
    FROM evaluation_samples WHERE run_id = $run
"""
_EVALUATED = """
    WITH numbered AS (
        SELECT row_number() OVER (ORDER BY problem_id, sample) - 1 AS response_id, problem_id, sample, score
        FROM evaluation_samples WHERE run_id = $run AND step = $step AND dataset = $dataset
    ), chosen AS (
        SELECT response_id, problem_id, sample FROM numbered WHERE $response IS NULL OR response_id = $response
        QUALIFY $response IS NOT NULL OR row_number() OVER (ORDER BY score DESC, response_id) = 1
            OR row_number() OVER (ORDER BY score, response_id DESC) = 1
    )
    SELECT step, dataset, response_id, problem_id, sample, prompt, response, answer, score, correct, num_tokens,
           finish_reason, reward_error
    FROM evaluation_samples JOIN chosen USING (problem_id, sample)
    WHERE run_id = $run AND step = $step AND dataset = $dataset ORDER BY score DESC, response_id
"""
_EVALUATED_TURNS = f"""
    SELECT {TURN_COLUMNS} FROM turns
    WHERE run_id = $run AND step = $step AND dataset = $dataset AND problem_id = $problem AND sample = $sample
    ORDER BY turn
"""
_BEFORE = "    │ "
"""Prefix of each line of recorded text, which distinguishes it from the program's own output."""


def sampled_responses(home: Home, run_id: str, step: int | None, response: int | None) -> list[dict[str, Any]]:
    """Returns one response of a step, or those with the highest and the lowest reward, as plain data.

    Args:
        home: the home with the run.
        run_id: the run's id.
        step: step of training; None: the last recorded one.
        response: place in the step's batch; None: the best and the worst.
    Raises:
        RpgError: no such response is recorded.
    """
    from storage import Store

    with Store.open(home.root) as store:

        def rows(query: str, **values: Any) -> list[dict[str, Any]]:
            result = store.query(query, {"run": run_id, **values})
            return as_objects(result.columns, result.rows)

        last = rows(_LAST_STEP)[0]["step"]
        if last is None:
            raise RpgError(f"no responses of {run_id} are recorded")
        step = last if step is None else step
        shown = [
            row | {"turns": rows(_TURNS, step=step, rollout=row["rollout_id"])}
            for chosen in rows(_CHOSEN, step=step, response=response)
            for row in rows(_RESPONSE, step=step, rollout=chosen["rollout_id"])
        ]
    if not shown:
        which = "" if response is None else f"response {response} of "
        raise RpgError(f"{which}step {step} of {run_id} is not recorded; its last recorded step is {last}")
    return shown


def evaluated_responses(
    home: Home, run_id: str, dataset: str, step: int | None, response: int | None
) -> list[dict[str, Any]]:
    """Returns one response of an evaluation, or those with the highest and the lowest score, as plain data.

    Args:
        home: the home with the run.
        run_id: the run's id.
        dataset: name of the evaluation set.
        step: step of training, 0 for the base model; None: the last evaluated one.
        response: its place among the set's responses; None: the best and the worst.
    Raises:
        RpgError: no such response is recorded.
    """
    from storage import Store

    with Store.open(home.root) as store:

        def rows(query: str, **values: Any) -> list[dict[str, Any]]:
            result = store.query(query, {"run": run_id, "dataset": dataset, **values})
            return as_objects(result.columns, result.rows)

        (measured,) = rows(_EVALUATED_STEPS)
        if measured["step"] is None:
            known = ", ".join(measured["datasets"] or ()) or "none"
            raise RpgError(f"no evaluation of {run_id} on {dataset} is recorded; its evaluation sets: {known}")
        step = measured["step"] if step is None else step
        shown = [
            row | {"turns": rows(_EVALUATED_TURNS, step=step, problem=row["problem_id"], sample=row["sample"])}
            for row in rows(_EVALUATED, step=step, response=response)
        ]
    if not shown:
        which = "" if response is None else f"response {response} of "
        raise RpgError(
            f"{which}step {step} of {run_id} on {dataset} is not recorded; the last evaluation was at step"
            f" {measured['step']}"
        )
    return shown


def print_responses(responses: Sequence[Mapping[str, Any]]) -> None:
    """Prints responses for people, and distinguishes the policy's input from its samples."""
    for place, row in enumerate(responses):
        ended = "cut off" if row["finish_reason"] == "length" else row["finish_reason"]
        if "dataset" in row:
            which = f"step {row['step']}, {row['dataset']}, response {row['response_id']}"
            facts = f"score {row['score']:.3g}"
        else:
            which = f"step {row['step']}, response {row['rollout_id']}"
            facts = f"reward {row['reward']:.3g}   advantage {row['advantage']:+z.3g}"
        print(f"{chr(10) if place else ''}{which}   {facts}   {row['num_tokens']:,} tokens   {ended}")
        if row["reward_error"]:
            _print_text("the scorer failed", row["reward_error"])
        _print_text("prompt", row["prompt"])
        for turn in conversation(row["turns"]):
            error = f" · {' '.join(turn.error.split())}" if turn.error else ""
            _print_text(f"{turn.speaker}: {turn.facts}{error}", turn.text)
        if not row["turns"]:
            _print_text("response", row["response"])


def _print_text(heading: str, text: str) -> None:
    print(f"  {heading}")
    for line in text.rstrip("\n").split("\n"):
        print(f"{_BEFORE}{line}".rstrip())
