"""Scorers that fail in every way a scorer can, for the pool's worker processes to run."""

import os
import resource
import signal
import time

from rpg.rewards.score import Score
from rpg.types import Problem
from specs.schema.reward import Reward


class Faulty(Reward):
    """Does what the response commands; gives 1 to any other response."""

    def score(self, problem: Problem, response: str) -> Score:
        if response == "raise":
            raise ZeroDivisionError("no such number")
        if response.startswith("away"):
            return _of_a_service(*response.split()[1:])
        if response == "hang":
            time.sleep(3600)
        if response == "hang deaf to signals":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(3600)
        if response == "die":
            os._exit(7)
        if response == "print":
            print("a line that is no verdict", flush=True)
        if response == "eat memory":
            return Score.of(float(len(bytearray(1 << 40))), None)
        if response == "start a daemon":
            return Score.of(1.0, str(_daemon()))
        if response == "start a daemon and die":
            os.write(2, str(_daemon()).encode())
            os._exit(7)
        if response == "environment":
            return Score.of(1.0, " ".join(sorted(os.environ)))
        if response == "limits":
            limits = [getattr(resource, f"RLIMIT_{name}") for name in ("AS", "NPROC", "FSIZE", "NOFILE", "CORE")]
            return Score.of(1.0, " ".join(str(resource.getrlimit(limit)[1]) for limit in limits))
        if response == "swallow":
            try:
                time.sleep(3600)
            except Exception:
                return Score.of(1.0, "swallowed")
        return Score.of(1.0, f"{problem.answer} {problem.metadata} {response}")


def _of_a_service(tries: str, answers_from: str = "never") -> Score:
    """Scores of a service that answers from that call on. `tries`: a file with a character for each call so far."""
    with open(tries, "a+") as file:
        file.write(".")
        file.seek(0)
        if len(file.read()) == int(answers_from if answers_from != "never" else 0):
            return Score.of(1.0, "answered")
    try:
        raise ConnectionRefusedError("nobody listens")
    except ConnectionRefusedError:
        raise RuntimeError("the service") from None


class AsksAService(Faulty):
    """A reward with a key of its own."""

    environment = ("SERVICE_KEY",)


def _daemon() -> int:
    """Starts a process that has left its session and its parent. Returns its id."""
    told, tells = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if pid := os.fork():
            os.write(tells, str(pid).encode())
            os._exit(0)
        os.close(tells)
        time.sleep(3600)
    os.wait()
    return int(os.read(told, 16))


class Unprepared(Faulty):
    """A reward whose library is not there."""

    def prepare(self) -> None:
        raise ImportError("no such library")
