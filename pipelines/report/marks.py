"""Marks behind the learning curves: moves of the reference, ramps of schedules, roll-backs, each at its step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pipelines.report.charts import Frame, color_class, number
from pipelines.report.evidence import Curve, Curves
from pipelines.report.palette import DrawnGroup
from specs.metrics import BY_NAME
from storage import Store

SCHEDULED = ("clip/low", "clip/high", "kl_coef", "reference/every_steps")
"""The metrics that record a value on a schedule."""
_MOST_NOTES = 8
_TICK = 5
"""Height in pixels of a move's tick; those of the next group stand above it."""
_EVENTS = """
    SELECT run_id, step, kind, message FROM events
    WHERE list_contains(?, run_id) AND kind IN ('reference_moved', 'rolled_back') ORDER BY step, run_id
"""


@dataclass(frozen=True, slots=True)
class Ramp:
    """Steps over which a value on a schedule changes without a pause."""

    metric: str
    first: int
    """The last step with the value from before."""
    last: int
    """The first step with the value it comes to."""
    start: float
    end: float

    def __str__(self) -> str:
        steps = f"at step {self.last}" if self.last == self.first + 1 else f"over steps {self.first} to {self.last}"
        return f"{BY_NAME[self.metric].title.lower()} from {number(self.start)} to {number(self.end)} {steps}"


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The marks of a page's learning curves, by the colour of the group."""

    moves: Mapping[int, Sequence[int]]
    """The steps after which the reference of one of the group's runs moved."""
    ramps: Mapping[int, Sequence[Ramp]]
    roll_backs: Mapping[int, Sequence[tuple[int, str]]]
    """(step that a run went back to, which run and why)"""

    def of(self, color: int) -> "StepMarks":
        """The marks of one group."""
        kept: list[Any] = [
            {color: marks[color]} if color in marks else {} for marks in (self.moves, self.ramps, self.roll_backs)
        ]
        return StepMarks(*kept)

    def draw(self, frame: Frame) -> str:
        """The marks in a chart: ramps as shaded steps, roll-backs as dashed lines, moves as ticks at the foot."""
        foot = frame.height - frame.bottom
        drawn = [
            f'<rect class="ramp" x="{left:g}" y="{frame.top}" width="{max(2.0, right - left):g}" '
            f'height="{foot - frame.top}"><title>{escape(str(ramp))}</title></rect>'
            for ramp in self._all_ramps()
            for left, right in _inside(frame, [(ramp.first, ramp.last)])
        ]
        drawn += [
            f'<line class="rolled-back" x1="{x:g}" x2="{x:g}" y1="{frame.top}" y2="{foot}">'
            f"<title>{escape(what)}</title></line>"
            for of_group in self.roll_backs.values()
            for step, what in of_group
            for x, _ in _inside(frame, [(step, step)])
        ]
        for row, (kind, steps) in enumerate(self._rows_of_moves()):
            # One tick for two pixels at most.
            ticks = sorted({2 * round(x / 2) for x, _ in _inside(frame, [(step, step) for step in steps])})
            path = "".join(f"M{x} {foot - row * _TICK}v-{_TICK - 1}" for x in ticks)
            drawn.append(f'<path class="moved {kind}" d="{path}"/>' if path else "")
        return "".join(drawn)

    def notes(self) -> list[str]:
        """Meaning of the marks, one line each."""
        lines = [f"shaded: {ramp}" for ramp in self._all_ramps()]
        lines += [f"dashed: {what}" for of_group in self.roll_backs.values() for _, what in of_group]
        if (left := len(lines) - _MOST_NOTES) > 0:
            lines[_MOST_NOTES:] = [f"{left} more"]
        return [*(["ticks at the foot: the reference moved"] if self.moves else []), *lines]

    def _all_ramps(self) -> list[Ramp]:
        """Each once, since groups often have them in common."""
        return list(dict.fromkeys(ramp for of_group in self.ramps.values() for ramp in of_group))

    def _rows_of_moves(self) -> list[tuple[str, Sequence[int]]]:
        """(class of the style sheet, steps) of each group; one row without a colour where all have the same steps."""
        distinct = {tuple(steps) for steps in self.moves.values()}
        if len(distinct) == 1:
            return [("", distinct.pop())]
        return [(color_class(color), steps) for color, steps in self.moves.items()]


def step_marks(store: Store, drawn: Sequence[DrawnGroup], curves: Curves) -> StepMarks:
    """The marks of the groups that are drawn in a colour of their own."""
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
    """The ramps of a recorded value: wherever it differs from one step to the next."""
    begun: int | None = None
    for index in range(1, len(curve) + 1):
        changes = index < len(curve) and curve[index, 1] != curve[index - 1, 1]
        if changes and begun is None:
            begun = index - 1
        elif not changes and begun is not None:
            (first, start), (last, end) = curve[begun], curve[index - 1]
            yield Ramp(metric, int(first), int(last), float(start), float(end))
            begun = None


def _inside(frame: Frame, spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The pixels of the spans of steps, cut to the chart; a span outside it is left out."""
    for first, last in spans:
        if last >= frame.x.low and first <= frame.x.high:
            cut = (max(first, frame.x.low), min(last, frame.x.high))
            yield frame.at((cut[0], frame.y.low))[0], frame.at((cut[1], frame.y.low))[0]
