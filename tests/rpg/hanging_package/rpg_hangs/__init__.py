"""A reward of a user's own that never comes back from some problems' answers."""

import os
import signal
from pathlib import Path

from rpg.rewards import Problem, Reward, Score


class Hangs(Reward):
    """1 for the right first letter. A problem's entry says where to leave the process's id, and how to hang."""

    def score(self, problem: Problem, response: str) -> Score:
        """See Reward."""
        entry = problem.metadata["entry"]
        Path(entry["pids"], str(os.getpid())).touch()
        if entry["hangs"] == "deaf to signals":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if entry["hangs"] == "raises":
            raise KeyError("no such entry")
        while entry["hangs"]:
            pass
        return Score.of(float(response[:1] == entry["answer"]), response or None)
