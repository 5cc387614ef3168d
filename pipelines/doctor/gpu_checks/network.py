"""Rate at which tensors travel between the ranks."""

import os
import time
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median

import torch
import torch.distributed as dist

from pipelines.doctor.gpu_checks.check import Bench, CheckFailedError, Figures
from rpg.processes import ranks

_SLOW = 0.5
"""A pair is an outlier if its rate is below this share of the median of its kind."""
_BYTES = {"cuda": 2**28, "cpu": 2**22}
_REPEATS = 5


def all_reduce_between_pairs(bench: Bench) -> Figures:
    """Returns the rate of an all-reduce between two ranks, for the pairs of `rounds_of_pairs`, in GB/s: bytes of the
    tensor over seconds.

    With two ranks that is the rate in each direction. The pairs of a round work at the same time, so that on a link
    that pairs share, each pair's share shows.
    """
    rates: dict[tuple[int, int], float] = {}
    hosts = ranks.gather(os.environ.get("CROSS_RANK", "0"))
    for pairs in rounds_of_pairs(hosts):
        mine = next((pair for pair in pairs if ranks.rank() in pair), None)
        # Formed by the two ranks alone: forming a group with all ranks takes longer the more ranks there are.
        group = dist.new_group(list(mine), use_local_synchronization=True) if mine else None
        rate = _rate(bench.device, group) if group else 0.0
        for pair, measured in filter(None, ranks.gather((mine, rate) if mine else None)):
            rates[pair] = measured
        if group:
            dist.destroy_process_group(group)
    figures: Figures = {}
    for kind, same in (("within_hosts", True), ("between_hosts", False)):
        chosen = {pair: rate for pair, rate in rates.items() if (hosts[pair[0]] == hosts[pair[1]]) == same}
        if not chosen:
            continue
        slowest, middle = min(chosen, key=chosen.__getitem__), median(chosen.values())
        figures |= {f"{kind}_gb_per_s": middle, f"{kind}_slowest_gb_per_s": chosen[slowest]}
        if chosen[slowest] < _SLOW * middle:
            raise CheckFailedError(
                f"ranks {slowest[0]} and {slowest[1]} exchange {chosen[slowest]:.3g} GB/s, the median of the pairs"
                f" {kind.replace('_', ' ')} is {middle:.3g}"
            )
    return figures


def rounds_of_pairs(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Returns the pairs of ranks in each round: first all pairs within a host, on all hosts at once; then, for every
    two hosts, the pairs of ranks with the same index on their host.

    That takes about as many rounds as a host has ranks and there are hosts; every two of all ranks would take as many
    as there are ranks.

    Args:
        hosts: the host of each rank.

    >>> rounds_of_pairs(["a", "a", "b", "b"])
    [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    """
    members = [[rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
    within = zip_longest(*(tournament(len(host)) for host in members), fillvalue=())
    rounds = [
        [(host[one], host[two]) for host, pairs in zip(members, meetings, strict=True) for one, two in pairs]
        for meetings in within
    ]
    between = (
        [pair for one, two in pairs for pair in zip(members[one], members[two], strict=False)]
        for pairs in tournament(len(members))
    )
    return [pairs for pairs in [*rounds, *between] if pairs]


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Returns rounds of disjoint pairs in which every two of `size` ranks meet exactly once.

    >>> tournament(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    players = list(range(size + size % 2))  # if odd, the one paired with the extra player rests in each round
    rounds = []
    for _ in players[1:]:
        half = len(players) // 2
        met = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append(sorted((min(pair), max(pair)) for pair in met if max(pair) < size))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _rate(device: torch.device, group: "dist.ProcessGroup") -> float:
    """Returns GB/s, as the mean over some all-reduces, after a first one that opens the connection. The sums must be
    right."""
    values = torch.ones(_BYTES[device.type] // 4, device=device)
    dist.all_reduce(values, group=group)
    dist.barrier(group=group)
    _wait(device)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(values, group=group)
    _wait(device)
    seconds = time.perf_counter() - start
    expected = float(2 ** (1 + _REPEATS))
    if not bool((values == expected).all()):
        raise CheckFailedError(
            f"an all-reduce of ones over two ranks gives {float(values.min())} to {float(values.max())}, not {expected}"
        )
    return values.nbytes * _REPEATS / seconds / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
