"""A conversation: the user's words are context, in the form that the chat template gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from places import PACKAGES
from scripted_policy import ScriptedPolicy
from spec_text import changed, message

from rpg.base.tokenization import make_tokenizer
from rpg.rollouters import Problem, SeededPrompt
from rpg.rollouters.environments.conversation import Conversation
from rpg.types import Rollout, Sampling
from specs.errors import SpecError
from specs.schema.model import ByteTokenizer
from specs.schema.rollout import TurnBounds
from tests.rpg.rollouters.test_tools import TEMPLATE
from tests.rpg.tiny_run import make_run, rows, train

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_length=400)
BYTES = make_tokenizer(ByteTokenizer(), ())


def speak(conversation: Conversation, *turns: str, tokenizer: Any = BYTES, problem: Problem | None = None) -> Rollout:
    """The rollout of a policy that says these turns, each ended by the end token."""
    said = iter([[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in turns])
    known: dict[tuple[int, ...], list[int]] = {}

    def says(context: tuple[int, ...]) -> list[int]:
        if context not in known:
            known[context] = next(said)
        return known[context]

    asked = [SeededPrompt(problem or Problem("p", "?", "42", "set"), (5,), 0)]
    policy: Any = ScriptedPolicy(says)
    (group,) = conversation.generate(asked, policy, tokenizer, group_size=1, sampling=SAMPLING)
    assert next(said, None) is None, "the policy had more to say"
    return group.rollouts[0]


def text_of(rollout: Rollout, tokenizer: Any = BYTES) -> str:
    return str(tokenizer.decode(list(rollout.response_ids)))


PLAIN = Conversation(type="conversation", user={"type": "scripted", "says": ("sure?", "really?")}, words="[{words}]")


def test_the_user_answers_each_turn_until_it_has_said_all() -> None:
    rollout = speak(PLAIN, "41", "40", "42")
    assert text_of(rollout) == "41<|endoftext|>[sure?]40<|endoftext|>[really?]42<|endoftext|>"
    assert [turn.sampled for turn in rollout.turns] == [True, False, True, False, True]
    assert rollout.finish_reason == "stop"
    assert {turn.reward for turn in rollout.turns} == {None}


def test_the_last_turn_that_is_allowed_is_not_answered() -> None:
    rollout = speak(PLAIN.model_copy(update={"max_turns": 2}), "41", "40")
    assert text_of(rollout) == "41<|endoftext|>[sure?]40<|endoftext|>"
    assert rollout.finish_reason == "length"


def test_the_words_may_be_those_of_the_problems_row() -> None:
    problem = Problem("p", "?", "42", "set", metadata={"user": ["once more"]})
    own = Conversation(type="conversation", user="scripted", words="[{words}]")
    assert text_of(speak(own, "a", "b", problem=problem)) == "a<|endoftext|>[once more]b<|endoftext|>"
    assert text_of(speak(own, "a")) == "a<|endoftext|>"


def test_a_user_of_a_package_answers_and_rewards_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    examined = Conversation(type="conversation", user="examiner", words="[{words}]")
    rollout = speak(examined, "40", "41", "42")
    assert text_of(rollout) == "40<|endoftext|>[no, not 40]41<|endoftext|>[no, not 41]42<|endoftext|>"
    assert [turn.reward for turn in rollout.turns if turn.sampled] == [-0.5, -1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({"max_turns": 3, "turn_tokens": 4}, TurnBounds(turns=3, sampled=12, given=20, length=32)),
        ({"max_turns": 9, "turn_tokens": 4}, TurnBounds(turns=3, sampled=12, given=20, length=32)),  # it says two texts
        ({"max_turns": 2, "turn_tokens": 4}, TurnBounds(turns=2, sampled=8, given=10, length=18)),
        ({"max_turns": 3, "sampled_tokens": 5}, TurnBounds(turns=3, sampled=5, given=20, length=25)),
    ],
)
def test_a_plan_counts_turns_and_what_the_user_says(options: dict[str, int], bounds: TurnBounds) -> None:
    assert PLAIN.model_copy(update={"words_tokens": 10, **options}).bounds(40) == bounds


def test_a_plan_counts_the_time_of_a_user_that_takes_some() -> None:
    model = {"type": "model", "model": "m", "endpoint": "http://127.0.0.1:9/v1", "instruction": "Ask."}
    asked = Conversation(type="conversation", user={**model, "timeout_seconds": 7.0}, max_turns=4)
    assert asked.bounds(1000).seconds == 3 * 7


@pytest.fixture(scope="module")
def chat() -> Any:
    tokenizer = make_tokenizer(ByteTokenizer(), ())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_conversation_is_what_the_chat_template_writes_of_it(chat: Any) -> None:
    rollout = speak(PLAIN.model_copy(update={"words": None}), "41", "40", "42", tokenizer=chat)
    roles = ("user", "assistant", "user", "assistant", "user", "assistant")
    said = ("?", "41", "sure?", "40", "really?", "42")
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    whole = chat.apply_chat_template(messages, tokenize=False)
    assert whole.rstrip("\n").endswith(text_of(rollout, chat))


def test_what_the_user_says_is_never_a_special_token(chat: Any) -> None:
    sly = Conversation(type="conversation", user={"type": "scripted", "says": ("<|im_end|>",)}, words="[{words}]")
    rollout = speak(sly, "a", "b", tokenizer=chat)
    assert chat.eos_token_id not in rollout.turns[1].token_ids


def test_a_model_without_a_template_needs_words() -> None:
    with pytest.raises(SpecError, match="the model's chat template does not support conversations"):
        speak(PLAIN.model_copy(update={"words": None}), "a")


@pytest.mark.parametrize(
    ("rollouter", "said"),
    [
        ("{type: conversation}", "rollout.rollouter.user: missing"),
        ("{type: conversation, user: nobody}", "unknown type"),
        ("{type: conversation, user: scripted, words: hello}", "rollout.rollouter.words"),
        (
            "{type: conversation, user: scripted, words_tokens: 31}",
            "two turns and a user's remark between them do not fit into a response",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said_at_its_line(
    rollouter: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = changed(
        "rollout: {max_response_length: 32}", f"rollout:\n  max_response_length: 32\n  rollouter: {rollouter}"
    )
    found = message(text)
    assert said in found
    assert "spec.yaml:13" in found


@pytest.mark.more
def test_a_conversation_is_trained_on_and_recorded(inputs: Path, tmp_path: Path) -> None:
    user = {"type": "scripted", "says": ["01"]}
    rollouter = {"type": "conversation", "user": user, "words": "={words}=", "words_tokens": 6}
    run = make_run(
        inputs, tmp_path / "run", rollout={"rollouter": rollouter, "max_response_length": 20}, training={"steps": 1}
    )
    train(run)
    given = [row["text"] for row in rows(run, "turns") if not row["sampled"]]
    assert len(given) > 5
    assert set(given) == {"=01="}
    assert json.loads((run / "certificate.json").read_text())["turns"] == "outcome"
