"""The ranks on one machine of several: their start, their signals, their end."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rpg.processes.parent import die_with_parent


@dataclass(frozen=True, slots=True)
class Share:
    """What one machine is to start."""

    run_dir: str
    first_rank: int
    ranks: int
    world_size: int
    node: int
    """From 0."""
    nodes: int
    master_address: str
    master_port: int
    log: str
    """Appended; on the shared file system."""
    device: str = "cpu"
    """The spec's resources.device; where it is not the CPU, GPU slots are leased for the ranks."""
    gpus: int = 0
    """Those of the ranks and their engines; 0: one a rank."""
    interface: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Share":
        """From plain data that may hold more."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """What torch.distributed, DeepSpeed and the trainer read."""
        names = {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {
            **names,
            **self.environment,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(self.ranks),
            "CROSS_RANK": str(self.node),
            "CROSS_SIZE": str(self.nodes),
            "PYTHONUNBUFFERED": "1",
        }


ENDED_WELL = (0, 143, -signal.SIGTERM)
"""Codes of a rank that is done or was asked to stop; the last, where the signal met it on its way in or out."""


class Ranks:
    """One process a rank, output in the machine's log. They die with this process, however it ends."""

    def __init__(self, share: Share, slots: Sequence[str] = ()) -> None:
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(slots)} if slots else {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        with open(share.log, "ab") as log:
            last = share.first_rank + share.ranks - 1
            where = f"node {share.node} of {share.nodes}, {socket.gethostname()}"
            log.write(f"{where}: ranks {share.first_rank} to {last}\n".encode())
            log.flush()
            for local_rank in range(share.ranks):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "rpg.train", share.run_dir],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment | share.rank_environment(local_rank),
                        preexec_fn=partial(die_with_parent, os.getpid()),
                    )
                )

    def codes(self) -> list[int | None]:
        """Exit codes; None while a rank runs, negative where a signal ended it."""
        return [process.poll() for process in self.processes]

    def over(self) -> bool:
        """Whether all have ended, or one has failed, so that the others wait for it in vain."""
        codes = self.codes()
        return None not in codes or any(code not in (None, *ENDED_WELL) for code in codes)

    def stop(self) -> None:
        """Asks them to save their state and end."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self, *, settle_seconds: float = 0.0) -> list[int | None]:
        """Ends what still runs, and all it started. Returns the codes of those that had ended by themselves, else None.

        Args:
            settle_seconds: how long a rank may yet end by itself, so that its own code is seen.
        """
        deadline = time.monotonic() + settle_seconds
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.05)
        codes = self.codes()
        running = [process for process, code in zip(self.processes, codes, strict=True) if code is None]
        family: list[psutil.Process] = []
        for process in running:
            with contextlib.suppress(psutil.Error):
                family += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
        for process in running:
            process.wait()
        return codes


def verdict(codes: Sequence[int | None]) -> int:
    """One exit code for many, as a shell has it: the first that tells of a failure, 143 if any was stopped, else 0.

    None is no code: the rank was killed because of another's end.
    """
    failures = [code for code in codes if code is not None and code not in ENDED_WELL]
    # A rank that a signal ended is the cause of its peers' complaints.
    if killed := [code for code in failures if code < 0]:
        return 128 - killed[0]
    if failures:
        return failures[0]
    return 143 if any(codes) else 0


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            return str(name)
    return ""


def address_of(interface: str) -> str:
    """The first IPv4 address of an interface. Raises ValueError where there is no such interface or it has none."""
    found = psutil.net_if_addrs()
    for entry in found.get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ValueError(f"there is no interface {interface} with an IPv4 address here; there are: {', '.join(found)}")


_PORTS = range(20000, 32000)
"""Below those that Linux gives to outgoing connections: one of these may take a port before the ranks have started."""


def free_port(address: str = "") -> int:
    """A TCP port of this machine that nobody listens at now."""
    for port in (*random.SystemRandom().sample(_PORTS, 50), 0):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((address, port))
            return int(listener.getsockname()[1])
    raise OSError(f"no port of {address or 'this machine'} is free")


def log_of(run_dir: Path, node: int, host: str) -> Path:
    """Where the ranks of a machine write: a file that `rpg logs` shows."""
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in host)
    return run_dir / "logs" / f"train-{node}-{name}.log"
