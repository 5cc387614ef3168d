"""Stores the answers of a running evaluation, so that the next attempt after an interruption can reuse them.

They are in a directory of the stage, one file per batch of problems, until the stage has its result.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rpg.evaluation.records import Answered
from rpg.evaluation.results import MeasuredPolicy
from rpg.evaluation.sequences import decode_sequences
from rpg.rewards import Score
from rpg.types import Problem, RecordedTurn
from specs.machine.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class KeptAnswers:
    """The stored answers of one policy."""

    directory: Path

    @classmethod
    def of(cls, policy: MeasuredPolicy, stage: Path) -> "KeptAnswers":
        """Returns a policy's stored answers. `stage`: directory of the evaluate stage; its fingerprint covers
        everything except the weights."""
        weights = hashlib.sha256(json.dumps(dict(policy.digests), sort_keys=True).encode()).hexdigest()
        return cls(stage / f"step-{policy.step:06}-{weights[:16]}")

    def read(self, problems: Sequence[Problem]) -> list[Answered] | None:
        """Returns the answers to a batch, in the order of its problems; None if they are missing or incomplete."""
        kept = read_json(self._file(problems)).get("answers")
        if kept is None:
            return None
        samples = len(kept) // len(problems)
        return [
            Answered(
                problems[index // samples],
                index % samples,
                **fields
                | {
                    "score": Score(**fields["score"]),
                    "turns": tuple(RecordedTurn(**turn) for turn in fields.get("turns", ())),
                    "sequences": decode_sequences(fields.get("sequences", ())),
                },
            )
            for index, fields in enumerate(kept)
        ]

    def write(self, problems: Sequence[Problem], answered: Sequence[Answered]) -> None:
        """Stores the answers to a batch, each problem's samples in order. Raises DiskError if writing fails."""
        kept = [
            {
                "response": each.response,
                "num_tokens": each.num_tokens,
                "finish_reason": each.finish_reason,
                "score": asdict(each.score),
                "turns": [asdict(turn) for turn in each.turns],
                "sequences": [[sequence.token_ids, sequence.scored] for sequence in each.sequences],
            }
            for each in answered
        ]
        write_json(self._file(problems), {"answers": kept}, allow_nan=True)

    def _file(self, problems: Sequence[Problem]) -> Path:
        names = json.dumps([(problem.dataset, problem.problem_id) for problem in problems])
        return self.directory / f"{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"
