"""Stands for the library in the scorer's processes: a task that never comes back from some problems' answers."""

import os
import signal
from pathlib import Path
from typing import Any


class Task:
    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """1 for the right first letter. An entry says where to leave the process's id, and how to hang."""
        Path(entry["pids"], str(os.getpid())).touch()
        if entry["hangs"] == "deaf to signals":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        while entry["hangs"]:
            pass
        return float(answer[:1] == entry["answer"])


def create_dataset(_name: str, **_config: Any) -> Task:
    """As the library's."""
    return Task()
