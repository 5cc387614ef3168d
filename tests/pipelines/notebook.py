"""A Jupyter kernel, as a notebook uses one."""

import os
import time
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Self

from places import ROOT

_MOST_SECONDS = 500


class Notebook:
    """A kernel of its own, with a home to work in."""

    def __init__(self, home: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        environment = os.environ | {"RPG_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._kernel, self._client = start_new_kernel(env=environment)

    def cell(self, code: str, *, interrupt_at: str = "") -> str:
        """Runs a cell and returns all that it shows.

        Args:
            interrupt_at: a text; once it is shown, the kernel is interrupted as by the stop button.
        """
        asked = self._client.execute(code)
        shown, until = "", time.monotonic() + _MOST_SECONDS
        while time.monotonic() < until:
            try:
                message = self._client.get_iopub_msg(timeout=5)
            except Empty:
                continue
            content = message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            match message["msg_type"]:
                case "stream":
                    shown += content["text"]
                case "execute_result" | "display_data":
                    shown += "\n".join(content["data"].values())
                case "error":
                    shown += f"{content['ename']}: {content['evalue']}"
                case "status" if content["execution_state"] == "idle":
                    return shown
            if interrupt_at and interrupt_at in shown:
                self._kernel.interrupt_kernel()
                interrupt_at = ""
        raise TimeoutError(shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel(now=True)
