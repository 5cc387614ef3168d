"""On PYTHONPATH, holds a trainer that is ready to the address space it has then and TEST_SPARE_MIB more: a real limit,
met by whatever allocates too much afterwards."""

import os
import re
import resource
import sys


def _hold(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or "/attempts/" not in str(arguments[0]) or _held:
        return
    _held.append(True)
    with open("/proc/self/status", encoding="utf-8") as status:
        size = int(re.search(r"VmSize:\s+(\d+) kB", status.read())[1]) * 1024
    limit = size + int(os.environ["TEST_SPARE_MIB"]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


_held: list[bool] = []
if "TEST_SPARE_MIB" in os.environ and "rpg.train" in sys.orig_argv:
    sys.addaudithook(_hold)
