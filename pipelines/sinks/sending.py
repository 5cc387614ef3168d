"""Sends a run's record to a sink, at once or as it grows during execution, and notes how much the sink has."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.home.home import Home
from pipelines.home.runs import read_state
from pipelines.sinks.record import Ending, News, Point, describe, read_ending, read_news
from pipelines.sinks.tracker import Session, open_session
from specs.errors import RpgError
from specs.machine.files import now, read_json, write_json
from specs.machine.liveness import is_executed
from specs.reading.recorded import recorded_spec
from specs.schema.execution import Sink, not_installed
from specs.secrets import hide

_LOOK_SECONDS = 10.0
"""Seconds between two reads of a running run's record."""
_STATUS_SECONDS = 0.5
"""Seconds between two checks of whether the run still runs."""


class SinkError(RpgError):
    """Error raised if a sink did not get all records of the run."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A sink's copy of a run, as last noted in the run's directory."""

    steps: int = 0
    """Number of steps whose metrics the sink has."""
    evaluated: int = 0
    """Number of steps whose evaluations the sink has."""
    ended_at: str = ""
    """Time of the run's end, if everything was sent. Empty if more may follow."""
    error: str = ""
    """Error of the last attempt. Empty if it succeeded."""
    at: str = ""
    """Time of this note."""


def noted(home: Home, run_id: str, sink: Sink) -> Sent:
    """Returns the note of a sink's copy of a run."""
    note = read_json(_file(home, run_id, sink))
    return Sent(**note) if note else Sent()


def is_behind(home: Home, run_id: str, sink: Sink) -> bool:
    """Returns whether a sink lacks records of a run that has ended."""
    ended_at = read_state(home, run_id).get("ended_at")
    return bool(ended_at) and noted(home, run_id, sink).ended_at != ended_at


def sinks_of(home: Home, run_id: str) -> tuple[Sink, ...]:
    """Returns the sinks of a run's experiment, from its file at the last execution. If the experiment has no record,
    returns those of the run's own spec."""
    experiment = read_json(home.run(run_id) / "run.json").get("experiment", "")
    frozen = home.experiment(experiment)
    return recorded_spec(frozen if (frozen / "spec.json").exists() else home.run(run_id)).sinks


def send(home: Home, run_id: str, sink: Sink, *, follow: bool = False) -> Sent:
    """Sends a run's records and its state.

    Args:
        follow: keep sending until the run is no longer executed.
    Raises:
        SinkError: the sink's package is missing, or the tracker fails. Points that have arrived stay; a later call
        sends the rest.
    """
    if missing := not_installed(sink):
        raise SinkError(missing)
    sending = _Sending(home, run_id, sink)
    try:
        while not sending.session(follow=follow):
            continue
    except Exception as error:  # any error of a tracker's library
        message = hide(str(error)).strip() or type(error).__name__
        sending.note(error=message)
        raise SinkError(f"{sink.type}: {message}") from error
    return sending.note(ended_at=read_state(home, run_id).get("ended_at") or "")


class _Sending:
    """Progress of one call of `send`."""

    def __init__(self, home: Home, run_id: str, sink: Sink) -> None:
        self._home, self._run_id, self._sink = home, run_id, sink
        self._run = describe(home, run_id)
        self._steps: set[int] = set()
        self._evaluations: dict[int, Point | None] = {}
        """Step -> the point that was sent for it; None if an earlier session sent it."""
        self._attempt = 0
        """Number of the trainer's last start that was read."""

    def session(self, *, follow: bool) -> bool:
        """Runs one session. Returns False if another session must begin, because the record has withdrawn points that
        were sent."""
        from storage import Store

        session = open_session(self._sink, self._run, self._home)
        steps, evaluated = session.held()
        self._steps, self._evaluations, self._attempt = steps, dict.fromkeys(evaluated), 0
        with Store.open(self._home.root) as store:
            while True:
                # The status first: if the run has ended by now, the record is complete.
                executed = self._is_executed()
                store.refresh()
                news = read_news(store, self._run_id, after=max(self._steps, default=0), attempt=self._attempt)
                if session.replaces and self._is_overtaken(news):
                    session.close(Ending("running"))
                    return False
                self._send(session, news)
                if not (follow and executed):
                    session.close(read_ending(self._home, store, self._run))
                    return True
                self.note()
                self._wait()

    def note(self, *, ended_at: str = "", error: str = "") -> Sent:
        """Notes in the run's directory how much of the run the sink has."""
        sent = Sent(len(self._steps), len(self._evaluations), ended_at, error, now())
        path = _file(self._home, self._run_id, self._sink)
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(sent), durable=False)
        return sent

    def _is_overtaken(self, news: News) -> bool:
        """Returns whether the record has replaced points that were sent."""
        changed = any(self._evaluations.get(point.step, point) != point for point in news.evaluations)
        return changed or (news.resumed_from is not None and news.resumed_from < max(self._steps, default=0))

    def _send(self, session: Session, news: News) -> None:
        """Sends the points that the session lacks: all of them, or only those of settled steps."""

        def due(point: Point) -> bool:
            return session.replaces or news.settled is None or point.step <= news.settled

        metrics = [point for point in news.metrics if due(point)]
        evaluations = [point for point in news.evaluations if due(point) and point.step not in self._evaluations]
        session.send(metrics, evaluations)
        self._steps |= {point.step for point in metrics}
        self._evaluations |= {point.step: point for point in evaluations}
        self._attempt = news.attempt

    def _wait(self) -> None:
        """Waits until the next read of the record, or the run's end."""
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline and self._is_executed():
            time.sleep(_STATUS_SECONDS)

    def _is_executed(self) -> bool:
        """Returns whether a process executes the run and has not recorded its end. A finished run counts as finished
        until one of its stages is executed again."""
        state = read_state(self._home, self._run_id)
        return state.get("pid") is not None and is_executed(self._home.run(self._run_id), state)


def _file(home: Home, run_id: str, sink: Sink) -> Path:
    return home.run(run_id) / "sinks" / f"{sink.type}.json"
