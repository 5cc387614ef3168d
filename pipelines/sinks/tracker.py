"""Sessions with a tracker, which update its copy of a run from the record."""

import os
from collections.abc import Sequence
from typing import ClassVar, Protocol, assert_never

from pipelines.home.home import Home
from pipelines.sinks.record import Ending, Point, SentRun
from specs.errors import RpgError
from specs.machine.foreign.listeners import foreign_listener
from specs.schema.execution import MlflowSink, Sink, TensorboardSink, TrackioSink, WandbSink


class Session(Protocol):
    """A run's copy at one tracker, while it is being written."""

    replaces: ClassVar[bool]
    """Whether a session rewrites the copy, so that withdrawn records disappear from it. Otherwise the session extends
    the copy, and gets only settled steps."""

    def send(self, metrics: Sequence[Point], evaluations: Sequence[Point]) -> None:
        """Adds points that the copy lacks, and waits until they are stored or passed to the library."""
        ...

    def close(self, ending: Ending) -> None:
        """Sends the run's state, and returns when everything has arrived."""
        ...

    def held(self) -> tuple[set[int], set[int]]:
        """Returns the steps whose metrics the copy has when the session begins, and those whose evaluations it has."""
        ...


def open_session(sink: Sink, run: SentRun, home: Home) -> Session:
    """Opens a session. Raises the errors of the tracker's library, and RpgError if another user of this
    machine listens at its address."""
    if why := foreign_listener(_address(sink)):
        raise RpgError(why)
    match sink:
        case TensorboardSink():
            from pipelines.sinks.tensorboard import TensorboardSession

            return TensorboardSession(run, home)
        case MlflowSink():
            from pipelines.sinks.mlflow import MlflowSession

            return MlflowSession(sink, run, home)
        case WandbSink():
            from pipelines.sinks.wandb import WandbSession

            return WandbSession(sink, run, home)
        case TrackioSink():
            from pipelines.sinks.trackio import TrackioSession

            return TrackioSession(sink, run, home)
        case never:
            assert_never(never)


def _address(sink: Sink) -> str:
    """Returns the address that the tracker's password or key is sent to; empty if it has neither."""
    match sink:
        case MlflowSink() if {"MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"} & {*os.environ}:
            return sink.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        case WandbSink() if sink.mode != "offline":
            return os.environ.get("WANDB_BASE_URL", "")
    return ""
