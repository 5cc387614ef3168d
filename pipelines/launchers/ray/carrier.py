"""Actor in a bundle of the placement group: it starts the node program there, and carries bytes to and from it.

Ray sends this module by value: a Ray worker needs nothing of ours to run it. It imports only the standard library and
Ray.
"""

import contextlib
import os
import select
import subprocess
from collections.abc import Mapping, Sequence

import ray


class Carrier:
    """The owner of a node program, which ends with this process: its orders end then."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], address: str) -> None:
        """Starts the program.

        Args:
            command: its command line.
            variables: variables of its environment, in addition to this process's.
            address: the variable that is set to this node's address.
        """
        # Ray sets the number of threads by its own count of CPUs.
        here = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        here[address] = ray.util.get_node_ip_address()
        self._program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={**here, **variables}
        )

    def node(self) -> str:
        """Returns the node's id in the cluster."""
        return str(ray.get_runtime_context().get_node_id())

    def send(self, data: bytes) -> None:
        """Sends the program an order."""
        assert self._program.stdin is not None
        with contextlib.suppress(OSError):
            self._program.stdin.write(data)
            self._program.stdin.flush()

    def receive(self) -> bytes:
        """Returns the program's output, after a second at most; empty if it wrote nothing, END if the
        output has ended."""
        assert self._program.stdout is not None
        output = self._program.stdout.fileno()
        if not select.select([output], [], [], 1.0)[0]:
            return b""
        return os.read(output, 1 << 16) or END


END = b"\0end"
"""Marks the end of the program's output."""
