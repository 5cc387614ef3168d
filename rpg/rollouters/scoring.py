"""Scoring of finished responses while others are still sampled."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from rpg.rewards import Score, Scorer
from rpg.rewards.score import Group, checked, largest_added, number
from rpg.types import Problem, RecordedTurn, Rollout
from specs.schema.reward import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Scoring:
    """The responses of one call of a rollouter, with their texts and scores. They may end in any order."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        scorer: Scorer,
        problems: Sequence[Problem],
        *,
        group_size: int,
        reward_at: Callable[[str], Reward],
        with_turns: bool = False,
    ) -> None:
        """Takes the scorer and the problems.

        Args:
            tokenizer: the policy's tokenizer.
            scorer: the scorer of the responses.
            problems: one problem per response, in the order of the rollouter's responses.
            group_size: number of responses to each prompt; these are consecutive.
            reward_at: the reward of the problems of a set, by the set's place in the spec.
            with_turns: whether to keep the turns of each response for the record.
        """
        self._group_size = group_size
        self._groups = [Group(group_size) for _ in range(len(problems) // group_size)]
        self._with_turns = with_turns
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._reward_at = reward_at
        self._problems = problems
        self._texts: dict[int, str] = {}
        self._verdicts: dict[int, Future[Score]] = {}
        self._turns: dict[int, tuple[RecordedTurn, ...]] = {}
        self._turn_rewards: dict[int, float] = {}
        self._faults: dict[int, str] = {}
        """Response -> reason why the rewards of its turns are invalid."""

    def begin(self, index: int, rollout: Rollout) -> None:
        """Starts to score a response. The scored answer is the one that the environment states, else the text of the
        last sampled turn after the beginning that the chat template wrote."""
        said = self._decoded(rollout.answer_ids)
        self._texts[index] = said if len(rollout.turns) == 1 else self._decoded(rollout.response_ids)
        answer = self._prefill(index, rollout) + said if rollout.answer is None else rollout.answer
        fault = self._fault_of_turns(index, rollout)
        if self._with_turns:
            self._turns[index] = tuple(
                RecordedTurn(
                    turn.sampled,
                    len(turn.token_ids),
                    str(self._tokenizer.decode(list(turn.token_ids))),
                    turn.tool,
                    turn.error,
                    turn.seconds,
                    0.0 if fault and turn.reward is not None else turn.reward,
                    turn.restart,
                )
                for turn in rollout.turns
            )
        self._turn_rewards[index] = 0.0 if fault else rollout.turn_rewards
        group, place = divmod(index, self._group_size)
        member = (self._groups[group], place)
        self._verdicts[index] = self._scorer.submit(self._problems[index], answer, member)

    def texts(self, number: int | None = None) -> list[str]:
        """Returns the texts of all responses or the first `number`, in order, including given turns.

        Raises:
            ValueError: the rollouter did not report one of them.
        """
        wanted = range(len(self._problems))[:number]
        missing = [index for index in wanted if index not in self._texts]
        if missing:
            raise ValueError(f"the rollouter did not call on_response for response {missing[0]}")
        return [self._texts[index] for index in wanted]

    def turns(self, number: int) -> list[tuple[RecordedTurn, ...]]:
        """Returns the turns of the first `number` responses, in order; empty if turns are not kept."""
        return [self._turns[index] for index in range(number)] if self._with_turns else []

    def scores(self, number: int | None = None) -> list[Score]:
        """Waits for the scores of all responses or the first `number`. Returns them in order."""
        return [self.score(index) for index in range(len(self._problems))[:number]]

    def score(self, index: int) -> Score:
        """Waits for the score of a response that has ended, and returns it."""
        score = self._verdicts[index].result()
        if fault := self._faults.get(index):
            return checked(self._reward_at(self._problems[index].source), Score.failed(fault))
        return replace(score, turns=self._turn_rewards[index]) if self._turn_rewards[index] else score

    def _fault_of_turns(self, index: int, rollout: Rollout) -> str:
        """Records and returns why the rewards of a response's turns are invalid; empty if they are valid. Invalid
        rewards make the response fail."""
        if not (rewards := [turn.reward for turn in rollout.turns if turn.reward is not None]):
            return ""
        largest = largest_added(self._reward_at(self._problems[index].source))
        try:
            total = sum(number("the reward of a turn", reward, largest) for reward in rewards)
            number("the sum of the turns' rewards", total, largest)
        except ValueError as error:
            self._faults[index] = f"the environment gave an invalid reward: {error}"
        return self._faults.get(index, "")

    def _prefill(self, index: int, rollout: Rollout) -> str:
        """Returns the beginning that the chat template wrote for the last sampled turn; empty if it wrote none."""
        prefill = self._problems[index].prefill
        last = max(place for place, turn in enumerate(rollout.turns) if turn.sampled)
        if not prefill or not last:
            return prefill
        given = rollout.turns[last - 1]
        return prefill if not given.sampled and self._decoded(given.token_ids).endswith(prefill) else ""

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
