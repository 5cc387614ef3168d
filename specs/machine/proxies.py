"""Exceptions to network proxies in the environment, so that programs on this machine reach each other directly."""

import os
from collections.abc import MutableMapping

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Variables that list hosts to reach without a proxy. Some clients read one of them, some the other."""
_EXCEPTIONS_OF_GRPC = "no_grpc_proxy"
"""gRPC reads this variable instead if it is set."""


def reach_this_machine_directly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds loopback and this machine's name to the hosts without a proxy, if the environment names a proxy.

    Every client reads these variables: httpx, requests, urllib, aiohttp, websockets, and programs in other languages.
    Other hosts keep their proxy.
    """
    if not any(name.lower().endswith("_proxy") and name.lower() not in EXCEPTIONS for name in environment):
        return
    host = os.uname().nodename
    own = [*_LOOPBACK, *dict.fromkeys(filter(None, (host, host.partition(".")[0])))]
    listed = [environment[name] for name in EXCEPTIONS if environment.get(name)]
    _extend(environment, EXCEPTIONS, listed, own)
    if of_grpc := environment.get(_EXCEPTIONS_OF_GRPC):
        _extend(environment, (_EXCEPTIONS_OF_GRPC,), [of_grpc], own)


def _extend(environment: MutableMapping[str, str], names: tuple[str, ...], listed: list[str], own: list[str]) -> None:
    hosts = [host.strip() for part in (*listed, *own) for host in part.split(",")]
    merged = ",".join(dict.fromkeys(filter(None, hosts)))
    for name in names:
        environment[name] = merged
