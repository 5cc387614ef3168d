"""Marks behind the learning curves: updates of the reference, ramps of schedules, and roll-backs, each at its step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.report.charts import Layer, Row, ink, layer, number
from pipelines.report.evidence import Curve, Curves
from pipelines.report.palette import DrawnGroup
from specs.metrics import BY_NAME
from storage import Store

SCHEDULED = (
    *("clip/low", "clip/high", "clip/dual", "max_ratio", "kl_coef", "entropy_coef", "temperature"),
    *("reference/every_steps", "reference/ema_decay"),
)
"""The metrics that record the value of a schedule or a closed loop."""
_MOST_NOTES = 8
_TICK = 5
"""Height in pixels of the tick of a reference update. The ticks of the next group are above it."""
_MOST_TICKS = 150
"""Largest number of ticks of a group. More would run together."""
_EVENTS = """
    SELECT run_id, step, kind, message FROM events
    WHERE list_contains(?, run_id) AND kind IN ('reference_moved', 'rolled_back') ORDER BY step, run_id
"""


@dataclass(frozen=True, slots=True)
class Ramp:
    """Steps over which a scheduled value changes without a pause."""

    metric: str
    first: int
    """The last step with the old value."""
    last: int
    """The first step with the final value."""
    start: float
    end: float

    def __str__(self) -> str:
        steps = f"at step {self.last}" if self.last == self.first + 1 else f"over steps {self.first} to {self.last}"
        return f"{BY_NAME[self.metric].title.lower()} from {number(self.start)} to {number(self.end)} {steps}"


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The marks of a page's learning curves, by the colour of the group."""

    moves: Mapping[int, Sequence[int]]
    """The steps after which the reference of one of the group's runs was updated."""
    ramps: Mapping[int, Sequence[Ramp]]
    roll_backs: Mapping[int, Sequence[tuple[int, str]]]
    """(step to which a run was rolled back, the run and the reason)"""

    def of(self, color: int) -> "StepMarks":
        """Returns the marks of one group."""
        kept: list[Any] = [
            {color: marks[color]} if color in marks else {} for marks in (self.moves, self.ramps, self.roll_backs)
        ]
        return StepMarks(*kept)

    def layers(self) -> list[Layer]:
        """Returns the marks as layers of a chart over steps: ramps as shaded steps, roll-backs as dashed lines, updates
        of the reference as ticks at the bottom."""
        ramps = [{"x": ramp.first, "x2": ramp.last, "text": str(ramp)} for ramp in self._all_ramps()]
        backs = [{"x": step, "text": what} for of_group in self.roll_backs.values() for step, what in of_group]
        moves: list[Row] = []
        for row, (color, steps) in enumerate(self._rows_of_moves()):
            apart = 1 + (max(steps) - min(steps)) // _MOST_TICKS
            ticks = {step // apart: step for step in steps}
            moves.append({"color": color, "row": row, "x": list(ticks.values())})
        # `stroke` makes a ramp of a single step visible too.
        ramp = {"type": "rect", "color": "var(--soft)", "stroke": "var(--soft)", "opacity": 0.12, "clip": True}
        back = {"type": "rule", "color": "var(--bad)", "strokeDash": [4, 3], "clip": True}
        move = {"type": "tick", "orient": "vertical", "size": _TICK - 1, "thickness": 1.4, "clip": True}
        top, bottom = {"value": 0}, {"value": {"expr": "height"}}
        foot = {"value": {"expr": f"height - {_TICK} * (datum.row + 0.5)"}}
        every = [
            (ramps, layer("", ramp, x2="x2", y=top, y2=bottom, tooltip="text")),
            (backs, layer("", back, y=top, y2=bottom, tooltip="text")),
            (moves, layer("", move, "x", y=foot)),
        ]
        return [drawn | {"data": {"values": rows}} for rows, drawn in every if rows]

    def notes(self) -> list[str]:
        """Returns the meaning of the marks, one line per kind."""
        lines = [f"shaded: {ramp}" for ramp in self._all_ramps()]
        lines += [f"dashed: {what}" for of_group in self.roll_backs.values() for _, what in of_group]
        if (left := len(lines) - _MOST_NOTES) > 0:
            lines[_MOST_NOTES:] = [f"{left} more"]
        return [*(["ticks at the bottom: updates of the reference"] if self.moves else []), *lines]

    def _all_ramps(self) -> list[Ramp]:
        """Returns each ramp once, since groups often share them."""
        return list(dict.fromkeys(ramp for of_group in self.ramps.values() for ramp in of_group))

    def _rows_of_moves(self) -> list[tuple[str, Sequence[int]]]:
        """Returns (colour, steps) of each group, or one grey row if all groups have the same steps."""
        distinct = {tuple(steps) for steps in self.moves.values()}
        if len(distinct) == 1:
            return [("var(--soft)", distinct.pop())]
        return [(ink(color), steps) for color, steps in self.moves.items()]


def step_marks(store: Store, drawn: Sequence[DrawnGroup], curves: Curves) -> StepMarks:
    """Returns the marks of the groups that are drawn in their own colour."""
    colors = {run_id: each.color for each in drawn if not each.pale for run_id in each.group.run_ids}
    names = {run.run_id: run.name or run.run_id for each in drawn for run in each.group.runs}
    moves: dict[int, list[int]] = {}
    roll_backs: dict[int, list[tuple[int, str]]] = {}
    for run_id, step, kind, message in store.query(_EVENTS, [list(colors)]).rows:
        if kind == "reference_moved":
            moves.setdefault(colors[run_id], []).append(step)
        else:
            roll_backs.setdefault(colors[run_id], []).append((step, f"{names[run_id]}: {message}"))
    ramps: dict[int, list[Ramp]] = {}
    for name in SCHEDULED:
        for run_id, curve in curves.get(name, {}).items():
            if run_id in colors:
                ramps.setdefault(colors[run_id], []).extend(ramps_of(name, curve))
    return StepMarks({color: sorted(set(moves[color])) for color in sorted(moves)}, ramps, roll_backs)


def ramps_of(metric: str, curve: Curve) -> Iterator[Ramp]:
    """Yields the ramps of a recorded value: the stretches of steps over which it changes."""
    begun: int | None = None
    for index in range(1, len(curve) + 1):
        changes = index < len(curve) and curve[index, 1] != curve[index - 1, 1]
        if changes and begun is None:
            begun = index - 1
        elif not changes and begun is not None:
            (first, start), (last, end) = curve[begun], curve[index - 1]
            yield Ramp(metric, int(first), int(last), float(start), float(end))
            begun = None
