"""`python -m says_what_it_is WORD`: a program that prints what can be told of its process, as JSON, or does what its
word says."""

import atexit
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time

from specs.machine.parent import before_torch

_OF_THE_SERVER = "DS_ACCELERATOR"


def _described() -> dict[str, object]:
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    places = [
        os.readlink(f"/proc/self/fd/{number}") for number in descriptors if os.path.exists(f"/proc/self/fd/{number}")
    ]
    return {
        "parent": os.getppid(),
        "begun": sys.orig_argv,
        "arguments": sys.argv[1:],
        "name": __name__,
        "spec": sys.modules["__main__"].__spec__.name,
        "directory": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name != _OF_THE_SERVER},
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": os.umask(os.umask(0)),
        "open": [place for place in places if not place.startswith(("/proc", "pipe:"))][:1],
        "descriptors": len(places),
        "threads": [each.name for each in threading.enumerate()],
        "leads_its_group": os.getpgid(0) == os.getpid(),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "niceness": os.nice(0),
        "recursion": sys.getrecursionlimit(),
        "seekable": [sys.stdout.seekable(), sys.stderr.seekable()],
        "buffered": [sys.stdout.write_through, sys.stdout.line_buffering],
        "temporary": tempfile.gettempdir(),
    }


def _wait() -> None:
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
    print("ready", flush=True)
    time.sleep(600)


def _spoil() -> None:
    """Changes all that a fork could leave to the next, did it not end with the fork."""
    os.environ["LEFT"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    random.seed(0)
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    json.loads = None
    os.umask(0o777)
    sys.exit(7)


def _end(how: str) -> None:
    atexit.register(print, "said at the end")
    if how == "leave":
        sys.exit(3)
    if how == "complain":
        sys.exit("no")
    if how == "fail":
        raise ValueError("no")


def main(word: str, *rest: str) -> None:
    before_torch()  # as each stage does, first of all
    if word == "end":
        _end(*rest)
        return
    if word == "wait":
        _wait()
    if word == "spoil":
        _spoil()
    if word == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    said = _described()
    if word == "draw":
        import numpy
        import torch

        said |= {"random": random.random(), "numpy": float(numpy.random.rand()), "torch": float(torch.rand(()))}
    if word == "changing":
        said |= {"changing": importlib.import_module("changing").VALUE}
    print(json.dumps(said, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
