"""TensorBoard: event files in the home, in `tensorboard/RUN`, written with TensorBoard's own library, without torch or
TensorFlow."""

import json
import os
import time
from collections.abc import Sequence
from typing import ClassVar

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from pipelines.home.home import Home
from pipelines.sinks.record import Ending, Point, SentRun


class TensorboardSession:
    """A session that writes an event file with the whole run. The files of earlier sessions are emptied once it is on
    disk.

    It begins with a session log of step 0, at which an open TensorBoard discards what it has read of the run.
    """

    replaces: ClassVar[bool] = True

    def __init__(self, run: SentRun, home: Home) -> None:
        directory = home.tensorboard(run.run_id)
        self._earlier = list(directory.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(directory))
        self._writer.add_event(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START), step=0))
        self._begin(run)

    def held(self) -> tuple[set[int], set[int]]:
        """Returns no steps, because the file is new."""
        return set(), set()

    def send(self, metrics: Sequence[Point], evaluations: Sequence[Point]) -> None:
        """Writes and flushes scalars with the times at which they were recorded."""
        for point in [*metrics, *evaluations]:
            scalars = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()])
            self._writer.add_event(Event(wall_time=point.at.timestamp(), step=point.step, summary=scalars))
        self._writer.flush()
        self._empty_earlier()

    def close(self, ending: Ending) -> None:
        """Writes the run's status and results as texts."""
        for name, value in {"status": f"{ending.status} {ending.reason}".strip(), **ending.summary}.items():
            self._text(name, str(value))
        self._writer.close()

    def _empty_earlier(self) -> None:
        """Empties the files of earlier sessions. If one were deleted, an open TensorBoard would stop reading."""
        while self._earlier:
            file = self._earlier.pop()
            if file.stat().st_size:
                os.truncate(file, 0)
            else:
                file.unlink()

    def _begin(self, run: SentRun) -> None:
        """Writes the run's description: its cell and seed for the page HParams, its question and spec as texts."""
        start = SessionStartInfo(group_name=run.title)
        for path, value in {**run.cell, "seed": run.seed}.items():
            if isinstance(value, bool):
                start.hparams[path].bool_value = value
            elif isinstance(value, (int, float)):
                start.hparams[path].number_value = value
            else:
                start.hparams[path].string_value = value if isinstance(value, str) else json.dumps(value)
        metadata = hparams_metadata.create_summary_metadata(HParamsPluginData(session_start_info=start))
        tag = hparams_metadata.SESSION_START_INFO_TAG
        self._add(Summary.Value(tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR))
        self._text("question", run.question)
        self._text("spec", "    " + json.dumps(run.spec, indent=2).replace("\n", "\n    "))

    def _text(self, name: str, text: str) -> None:
        metadata = text_metadata.create_summary_metadata(display_name=None, description=None)
        self._add(Summary.Value(tag=f"run/{name}", metadata=metadata, tensor=make_tensor_proto([text])))

    def _add(self, value: Summary.Value) -> None:
        self._writer.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))
