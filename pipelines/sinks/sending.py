"""Sending a run's record to a sink, whole or as it grows while the run is executed; and what is noted of it."""

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
"""Between two looks at the record of a run that is executed."""
_STATUS_SECONDS = 0.5
"""Between two looks at whether it still is."""


class SinkError(RpgError):
    """A sink did not get all that the run recorded."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A sink's copy of a run, as it was last noted in the run's directory."""

    steps: int = 0
    """Steps whose metrics it has."""
    evaluated: int = 0
    """Steps whose evaluations it has."""
    ended_at: str = ""
    """When the run ended, where it was sent to the end; empty: there may be more."""
    error: str = ""
    """Why the last attempt failed; empty: it did not."""
    at: str = ""
    """When this was noted."""


def noted(home: Home, run_id: str, sink: Sink) -> Sent:
    """Note of a sink's copy of a run."""
    note = read_json(_file(home, run_id, sink))
    return Sent(**note) if note else Sent()


def is_behind(home: Home, run_id: str, sink: Sink) -> bool:
    """Whether a sink lacks something of a run that has ended."""
    ended_at = read_state(home, run_id).get("ended_at")
    return bool(ended_at) and noted(home, run_id, sink).ended_at != ended_at


def sinks_of(home: Home, run_id: str) -> tuple[Sink, ...]:
    """The sinks that a run's experiment has, as its file was when it was last run; those of the run's own spec where
    the experiment has no record."""
    experiment = read_json(home.run(run_id) / "run.json").get("experiment", "")
    frozen = home.experiment(experiment)
    return recorded_spec(frozen if (frozen / "spec.json").exists() else home.run(run_id)).sinks


def send(home: Home, run_id: str, sink: Sink, *, follow: bool = False) -> Sent:
    """Sends what a run has recorded, and how it stands.

    Args:
        follow: goes on sending until the run is no longer executed.
    Raises:
        SinkError: the sink's package is missing, or the tracker fails. What has arrived stays; a later call adds the
            rest.
    """
    if missing := not_installed(sink):
        raise SinkError(missing)
    sending = _Sending(home, run_id, sink)
    try:
        while not sending.session(follow=follow):
            continue
    except Exception as error:  # whatever a tracker's library raises
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
        """Step -> what was sent of it; None where an earlier session sent it."""
        self._attempt = 0
        """Number of the trainer's last start that was looked at."""

    def session(self, *, follow: bool) -> bool:
        """One session. Returns False where another has to begin, because the record took back what was sent."""
        from storage import Store

        session = open_session(self._sink, self._run, self._home)
        steps, evaluated = session.held()
        self._steps, self._evaluations, self._attempt = steps, dict.fromkeys(evaluated), 0
        with Store.open(self._home.root) as store:
            while True:
                # The status first: of a run that has ended by now, the record is whole.
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
        """Notes in the run's directory what the sink has."""
        sent = Sent(len(self._steps), len(self._evaluations), ended_at, error, now())
        path = _file(self._home, self._run_id, self._sink)
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(sent), durable=False)
        return sent

    def _is_overtaken(self, news: News) -> bool:
        """Whether the record has something else in the place of what was sent."""
        changed = any(self._evaluations.get(point.step, point) != point for point in news.evaluations)
        return changed or (news.resumed_from is not None and news.resumed_from < max(self._steps, default=0))

    def _send(self, session: Session, news: News) -> None:
        """Sends what the session has not: all of it, or the settled steps."""

        def due(point: Point) -> bool:
            return session.replaces or news.settled is None or point.step <= news.settled

        metrics = [point for point in news.metrics if due(point)]
        evaluations = [point for point in news.evaluations if due(point) and point.step not in self._evaluations]
        session.send(metrics, evaluations)
        self._steps |= {point.step for point in metrics}
        self._evaluations |= {point.step: point for point in evaluations}
        self._attempt = news.attempt

    def _wait(self) -> None:
        """Until the next look at the record, or the run's end."""
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline and self._is_executed():
            time.sleep(_STATUS_SECONDS)

    def _is_executed(self) -> bool:
        """Whether a process executes the run, and has not recorded its end. One that had finished is called so until a
        stage of it is done anew."""
        state = read_state(self._home, self._run_id)
        return state.get("pid") is not None and is_executed(self._home.run(self._run_id), state)


def _file(home: Home, run_id: str, sink: Sink) -> Path:
    return home.run(run_id) / "sinks" / f"{sink.type}.json"
