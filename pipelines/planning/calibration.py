"""Agreement between judges and labels, as measured by `rpg judge calibrate`: kept in the home by the
judge's settings."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from pipelines.home.home import Home
from pipelines.planning.fingerprint import by_content
from specs.machine.files import read_json, write_json
from specs.schema.experiment import Experiment

if TYPE_CHECKING:  # a report does not reach the code that queries judges
    from rpg.rewards.functions.judge import Judge


def keep(home: Home, judge: "Judge", record: Mapping[str, Any]) -> None:
    """Stores the measurement of a judge, and replaces the previous one."""
    write_json(home.judge(_digest(judge)), dict(record), allow_nan=True)


def kept(home: Home, judge: "Judge") -> dict[str, Any]:
    """Returns the measurement of a judge with this wording, scale and sampling; empty if unmeasured."""
    return read_json(home.judge(_digest(judge)))


def trust_in(home: Home, specs: Iterable[Experiment]) -> str:
    """Returns, in sentences, how far the judges that trained or evaluated runs can be trusted; empty if there are no
    judges.

    Args:
        specs: the resolved specs of the runs.
    """
    judges: dict[str, Judge] = {}
    for spec in specs:
        judges |= {_digest(judge): judge for judge in _judges(spec)}
    return " ".join(_sentence(home, judge) for judge in judges.values())


def _sentence(home: Home, judge: "Judge") -> str:
    record = kept(home, judge)
    if not record:
        return (
            f"The judge {judge.model} has not been compared with labels: a gain in its scores may be an artefact (`rpg"
            " judge calibrate`)."
        )
    agreement, kappa = (_text(record[name]) for name in ("agreement", "kappa"))
    what = "pairs of answers" if judge.compares() else "answers"
    return (
        f"The judge {judge.model} agrees with labels on {agreement} of {record['count']} {what}; Cohen's kappa {kappa}."
    )


def _text(figure: Mapping[str, float]) -> str:
    value = f"{figure['value']:.2f}"
    return value if math.isnan(figure["low"]) else f"{value} [{figure['low']:.2f}, {figure['high']:.2f}]"


def _judges(spec: Experiment) -> Iterator["Judge"]:
    for _, reward in spec.rewards():
        yield from (cast("Judge", part) for part in reward.parts() if part.type == "judge")


def _digest(judge: "Judge") -> str:
    identity = by_content(judge)
    identity.pop("overlong", None)
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
