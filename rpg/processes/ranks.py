"""The data-parallel processes that a launcher starts: the rank of this process, and the collectives that they need.

They exchange tensors, or values that `rpg.messages` encodes as bytes.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from rpg.messages import decoded, encoded
from rpg.processes import proved_gloo
from rpg.processes.store import launch_store
from specs.machine import exit_cause
from specs.machine.launch import ON_LOOPBACK, engines_elsewhere
from specs.machine.standstill import show_work

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""Time limit of a collective on the host; the other ranks may be sampling. The launcher notices a rank that ends or
loses its machine; `specs.machine.standstill` detects that no rank works any more."""
_TOO_LATE = re.compile(r"Timed out waiting|timed out in|collective operation timeout")
"""Messages of gloo and NCCL after a collective has timed out. NCCL may also abort the process; see
`specs.machine.exit_cause.ranks_that_waited`."""
_SETTLE_SECONDS = 10.0
"""Largest difference between the times at which two ranks notice the same timeout."""
_LONGEST = 2**34
"""Largest number of bytes of a value that a rank sends."""


def join(device_type: str) -> None:
    """Joins the process group that the launcher describes in the environment, or a group of one if there is no
    launcher.

    Args:
        device_type: cpu (gloo) or cuda (nccl for tensors on the GPU, gloo for those on the host).
    """
    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # NCCL may need to reach an engine on another machine.
        os.environ.update(ON_LOOPBACK if not engines_elsewhere() else {"GLOO_SOCKET_IFNAME": "lo"})
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"))
        join_in(dist.HashStore(), device_type)  # type: ignore[attr-defined]
    else:
        join_in(launch_store(keeps=os.environ["RANK"] == "0"), device_type)


def join_in(store: Store, device_type: str) -> None:
    """Joins the ranks that meet in a store, with the rank from the environment."""
    backend = f"cpu:{proved_gloo.BACKEND},cuda:nccl" if device_type == "cuda" else proved_gloo.BACKEND
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size)


@contextmanager
def joined(device_type: str) -> Iterator[None]:
    """Makes this process, within the block, a member of the group of processes that a launcher has started. A single
    process joins no group."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    join(device_type)
    try:
        yield
    finally:
        leave()


def leave() -> None:
    """Leaves the group. Otherwise torch would print a warning at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _host.clear()
        _patient.clear()


def rank() -> int:
    """Returns the rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Returns the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Returns the rank of this process among those on this machine, from 0, as the launcher sets it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def on_this_machine() -> int:
    """Returns how many of the processes compute on this machine, as the launcher sets it. Without a launcher, all of
    them do."""
    return int(os.environ.get("LOCAL_SIZE", str(world_size())))


def total(values: Tensor) -> Tensor:
    """Sums over the ranks, in place and on the host."""
    if world_size() > 1:
        dist.all_reduce(values, group=_host_group())
        show_work()
    return values


def largest(values: Tensor) -> Tensor:
    """Computes the elementwise maximum over the ranks, in place and on the host."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=_host_group())
        show_work()
    return values


def all_to_all(tensors: Sequence[Tensor]) -> Tensor:
    """Sends the r-th tensor to rank r. Returns the tensors sent to this rank, concatenated in the order of the ranks.

    Args:
        tensors: one for each rank, on the host, with one dimension, the same type, and any length.
    """
    if world_size() == 1:
        return tensors[0]
    sizes = torch.tensor([len(tensor) for tensor in tensors])
    received = torch.empty_like(sizes)
    dist.all_to_all_single(received, sizes, group=_host_group())
    result = tensors[0].new_empty(int(received.sum()))
    together = torch.cat(list(tensors))
    dist.all_to_all_single(result, together, received.tolist(), sizes.tolist(), group=_host_group())
    show_work()
    return result


def any_rank(flag: bool) -> bool:
    """Returns whether the flag is set on any rank. All ranks get the same answer."""
    return bool(largest(torch.tensor([int(flag)])).item())


def gather(value: T) -> list[T]:
    """Returns the values of all ranks, in the order of the ranks, on every rank."""
    return _gather(value, _host_group)


def _gather(value: T, group: Callable[[], Any]) -> list[T]:
    if world_size() == 1:
        return [value]
    own, of_ranks = _bytes(value), group()
    lengths = torch.zeros(world_size(), 1, dtype=torch.int64)
    dist.all_gather(list(lengths), torch.tensor([len(own)]), group=of_ranks)
    _check_length(longest := int(lengths.max()))
    received = torch.empty(world_size(), longest, dtype=torch.uint8)
    dist.all_gather(list(received), torch.cat([own, own.new_zeros(longest - len(own))]), group=of_ranks)
    show_work()
    contents = [content[:length].numpy().data for content, length in zip(received, lengths[:, 0], strict=True)]
    return [value if place == rank() else decoded(content) for place, content in enumerate(contents)]


class Channel:
    """A separate group for collectives of another thread, which may run at the same time as those of the main
    thread."""

    def __init__(self) -> None:
        """Creates the group. All ranks do so together, in their main threads."""
        self._group = _patient_group() if world_size() > 1 else None

    def gather(self, value: T) -> list[T]:
        """Gathers a value, like `gather`."""
        return _gather(value, lambda: self._group)


def gather_made(
    make: Callable[[], T],
    *,
    what: str,
    gather: Callable[[Any], list[Any]] = gather,
    for_others: Callable[[T], T] = lambda made: made,
) -> list[T]:
    """Returns the results of all ranks, in their order. If one rank fails, all fail, because the others would otherwise
    wait for ever.

    Args:
        what: short description of the result, for the error on the other ranks.
        gather: `gather`, or the method of a `Channel`.
        for_others: returns the part of the result that the other ranks get.
    Raises:
        Exception: the error of this rank.
        RuntimeError: another rank failed; its error is in the message.
    """
    made: list[T] = []
    failure = None
    try:
        made = [make()]
    except Exception as error:
        failure = error
    sent = [for_others(each) for each in made]
    shares = gather((sent, f"{type(failure).__name__}: {failure}" if failure else ""))
    if failure:
        raise failure
    for rank_of_share, (_, message) in enumerate(shares):
        if message:
            raise RuntimeError(f"rank {rank_of_share} could not make its share of the {what}: {message}")
    received = [share for (share,), _ in shares]
    return [*received[: rank()], *made, *received[rank() + 1 :]]


class Exchange:
    """A context for repeated `gather_made` calls during a task that is divided among the ranks.

    An error between two exchanges is sent to the other ranks in place of the next result, and ends their work too.
    """

    def __init__(self, *, what: str, gather: Callable[[Any], list[Any]] = gather) -> None:
        """See `gather_made`."""
        self._what = what
        self._gather = gather
        self._all_know = False

    def __call__(self, make: Callable[[], T], *, for_others: Callable[[T], T] = lambda made: made) -> list[T]:
        """See `gather_made`. All ranks call it the same number of times."""
        self._all_know = True  # for an error that is raised here
        made = gather_made(make, what=self._what, gather=self._gather, for_others=for_others)
        self._all_know = False
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not self._all_know:
            self._gather((None, f"{type(error).__name__}: {error}"))


def from_first(value: T) -> T:
    """Returns rank 0's value on every rank."""
    if world_size() == 1:
        return value
    return from_rank(0, value, _host_group())


def from_rank(first: int, value: T, group: Any) -> T:
    """Returns the value of one rank on all ranks of a group. The group must support host tensors."""
    content = _bytes(value) if rank() == first else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(content)])
    dist.broadcast(length, src=first, group=group)
    _check_length(int(length))
    if rank() != first:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, src=first, group=group)
    show_work()
    received: T = value if rank() == first else decoded(content.numpy().data)
    return received


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(encoded(value)), dtype=torch.uint8)


def _check_length(length: int) -> None:
    if not 0 < length <= _LONGEST:
        raise ValueError(f"a rank announces {length} bytes")


def wait_for_all() -> None:
    """Returns once every rank has called it."""
    if world_size() > 1:
        total(torch.zeros(1))


_host: dict[str, Any] = {}


def _host_group() -> Any:
    """Returns a gloo group, with which objects need not go through a GPU."""
    if "group" not in _host:
        _host["group"] = _patient_group()
    return _host["group"]


_patient: list[Any] = []
"""Groups in which a rank waits without a limit while others work."""


def _patient_group() -> Any:
    _patient.append(group := dist.new_group(backend=proved_gloo.BACKEND, timeout=_PATIENCE))
    return group


_limit = 0.0
"""Limit in seconds that `bound_waits` set; 0 if none is set."""


def bound_waits(seconds: float) -> None:
    """Sets how long the learner's collectives wait for another rank from now on. Its groups must already exist.

    This module's own groups wait without that limit: their ranks may be sampling.
    """
    global _limit
    _limit = seconds
    if world_size() > 1:
        wait_for_all()
        for group in [*dist.distributed_c10d._world.pg_map]:
            if not any(group is patient for patient in _patient):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def absent_ranks(error: BaseException, directory: Path) -> str:
    """Returns a sentence that names the ranks missing from a collective that timed out; empty for any other error.

    Each rank whose wait timed out creates a file; ranks without a file have not arrived.

    Args:
        directory: directory of the files, on a file system that all ranks share; empty when the ranks start.
    """
    if world_size() == 1 or not _TOO_LATE.search(str(error)):
        return ""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"waited-{rank()}").touch()
    end = time.monotonic() + _SETTLE_SECONDS
    waited = set[int]()
    while len(waited) < world_size() and time.monotonic() < end:
        time.sleep(0.1)
        waited = {int(path.name.removeprefix("waited-")) for path in directory.glob("waited-*")}
    return exit_cause.absent_ranks(waited, world_size(), _limit)
