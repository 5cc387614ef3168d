"""Scorers that fail in every way a scorer can, for the pool's worker processes to run."""

import os
import signal
import time

from rpg.rewards.score import Score
from rpg.types import Problem
from specs.schema.reward import Reward


class Faulty(Reward):
    """Does what the response says; gives 1 to any other."""

    def score(self, problem: Problem, response: str) -> Score:
        if response == "raise":
            raise ZeroDivisionError("no such number")
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
        if response == "swallow":
            try:
                time.sleep(3600)
            except Exception:
                return Score.of(1.0, "swallowed")
        return Score.of(1.0, f"{problem.answer} {problem.metadata} {response}")


class Unprepared(Faulty):
    """A reward whose library is not there."""

    def prepare(self) -> None:
        raise ImportError("no such library")
