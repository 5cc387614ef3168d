"""A user whose words a model writes: its prompts, the end of a conversation, and its remarks after a kill."""

import json
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from spec_text import changed, message

from rpg.rewards.score import RewardAwayError
from rpg.rollouters import Problem
from rpg.rollouters.environments.conversation import Conversation
from specs.errors import SpecError
from tests.rpg.rewards.judge_endpoint import JudgeEndpoint, judging
from tests.rpg.rollouters.test_answers_kept import of_attempt
from tests.rpg.rollouters.test_conversation import speak, text_of
from tests.rpg.tiny_run import finish, make_run, rows, start

INSTRUCTION = "You want the answer {answer} to: {question} Say BYE when you have it. {user}"
PROBLEM = Problem("p", "Six times seven?", "42", "set", metadata={"user": ["You are in a hurry.", "Be {curt}."]})


def talk(endpoint: JudgeEndpoint, **options: Any) -> Conversation:
    user = {"type": "model", "model": "fair", "endpoint": endpoint.url, "instruction": INSTRUCTION, "end": "BYE"}
    return Conversation(type="conversation", user={**user, **options}, words="[{words}]")


def no_more_than(number: int) -> Any:
    """A user that says `so often?` until it has heard this many turns of the policy."""

    def said(request: dict[str, Any]) -> str:
        heard = sum(each["role"] == "user" for each in request["messages"]) - 1
        return " so often? " if heard < number else "Thanks. BYE"

    return said


def test_the_model_hears_the_policy_as_its_user_until_it_says_the_word() -> None:
    with judging(no_more_than(2)) as endpoint:
        rollout = speak(talk(endpoint, max_tokens=7), "41", "<|im_end|> 42", problem=PROBLEM)
    assert text_of(rollout).startswith("41<|endoftext|>[so often?]")
    assert rollout.finish_reason == "stop"
    first, second = endpoint.requests
    told = "You want the answer 42 to: Six times seven? Say BYE when you have it. You are in a hurry.\nBe {curt}."
    before = [
        {"role": "system", "content": told},
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "Six times seven?"},
        {"role": "user", "content": "41"},
    ]
    assert first["messages"] == before
    assert second["messages"][:4] == before
    assert second["messages"][4] == {"role": "assistant", "content": "so often?"}
    assert "<|im_end|>" not in second["messages"][5]["content"]  # the policy ends no turn of the model's
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("fair", 7, 1.0)
    assert first["seed"] != second["seed"]


def test_the_policys_system_message_is_not_the_users() -> None:
    asked = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1"}]
    asked += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    problem = Problem("p", "?", "42", "set", metadata={"user": []}, messages=json.dumps(asked))
    with judging(no_more_than(0)) as endpoint:
        speak(talk(endpoint), "4", problem=problem)
    (request,) = endpoint.requests
    roles = [(each["role"], each["content"]) for each in request["messages"][2:]]
    assert roles == [("assistant", "1"), ("user", "2"), ("assistant", "3"), ("user", "4")]


@pytest.mark.parametrize("said", ["", "  \n", (400, {}, "too long")])
def test_a_model_that_says_nothing_or_refuses_one_conversation_ends_that(said: Any) -> None:
    with judging(lambda _: said) as endpoint:
        rollout = speak(talk(endpoint), "41", problem=PROBLEM)
    assert (rollout.finish_reason, len(rollout.turns)) == ("stop", 1)


def test_a_limit_of_the_rate_and_an_outage_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_KEY", "sk-a-secret-of-the-test")
    states = iter([(429, {"Retry-After": "0"}, "slow down"), (503, {}, "away")])
    with judging(lambda request: next(states, None) or no_more_than(2)(request)) as endpoint:
        speak(talk(endpoint, key="env:USER_KEY"), "41", "40", problem=PROBLEM)
        assert len(endpoint.requests) == 4
        assert set(endpoint.keys) == {"Bearer sk-a-secret-of-the-test"}


def test_an_endpoint_that_stays_away_ends_the_attempt_and_one_that_refuses_the_key_the_run() -> None:
    with judging(lambda _: (503, {}, "away")) as endpoint:
        away = talk(endpoint, patience_seconds=0.1)
        with pytest.raises(RewardAwayError, match=f"the user at {endpoint.url} was unavailable"):
            speak(away, "41", problem=PROBLEM)
    with judging(lambda _: (401, {}, "who are you?")) as endpoint, pytest.raises(SpecError) as refused:
        speak(talk(endpoint), "41", problem=PROBLEM)
    (issue,) = refused.value.issues
    assert issue.message == "the user's endpoint refuses"
    assert issue.path == ("rollout", "rollouter", "user", "endpoint")


def test_a_row_without_what_the_instruction_names_is_an_error() -> None:
    with judging(no_more_than(2)) as endpoint, pytest.raises(SpecError, match=r"a problem has no \{user\}"):
        speak(talk(endpoint), "41")


def test_where_the_model_is_asked_is_no_part_of_what_it_says() -> None:
    with judging(no_more_than(1)) as endpoint:
        plain = talk(endpoint).user.identity()
    same = {"type", "model", "instruction", "end", "temperature", "max_tokens"}
    assert set(plain) == same


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "rollout.rollouter.user.instruction: missing"),
        (", instruction: Ask., endpoint: ftp://here", "rollout.rollouter.user.endpoint: is not the address of an API"),
        (", instruction: Ask., key: sk-123456789", "give a reference to the secret, not the secret itself"),
        (", instruction: Ask., end: BYE", "rollout.rollouter.user.end: the instruction does not tell the model this"),
        (", instruction: Ask., persona: x", "rollout.rollouter.user.persona: unknown field"),
    ],
)
def test_what_is_wrong_with_the_model_is_said_at_its_line(
    options: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    endpoint = "" if "endpoint" in options else ", endpoint: 'http://127.0.0.1:1/v1'"
    rollouter = f"{{type: conversation, user: {{type: model, model: m{endpoint}{options}}}, words_tokens: 8}}"
    text = changed(
        "rollout: {max_response_length: 32}", f"rollout:\n  max_response_length: 32\n  rollouter: {rollouter}"
    )
    found = message(text)
    assert said in found
    assert "spec.yaml:13" in found
    assert "sk-123456789" not in found


@pytest.mark.long
def test_a_step_that_a_kill_interrupts_hears_the_same_words_again(inputs: Path, tmp_path: Path) -> None:
    digits, reached, go_on = random.Random(), threading.Event(), threading.Event()
    held_in = tmp_path / "run" / "answers" / "000006"

    def says(_: dict[str, Any]) -> str:
        if not go_on.is_set() and sum(len(file.read_bytes().splitlines()) for file in held_in.glob("*")) >= 4:
            reached.set()
            go_on.wait()
        return "".join(digits.choices("01", k=4))

    with judging(says) as endpoint:
        user = {"type": "model", "model": "dice", "endpoint": endpoint.url, "instruction": "Say digits."}
        rollouter = {
            "type": "conversation",
            "user": user,
            "words": "={words}=",
            "words_tokens": 6,
            "max_turns": 3,
            "users_at_once": 2,
        }
        training = {
            "steps": 6,
            "group_size": 24,
            "optimizer": {"learning_rate": 1e-4},
            "checkpoint": {"every_steps": 4},
        }
        rollout = {"rollouter": rollouter, "max_response_length": 20}
        run = make_run(inputs, tmp_path / "run", rollout=rollout, training=training)
        process = start([sys.executable, "-m", "rpg.train", str(run)])
        while not reached.wait(0.05):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGKILL)
        finish(process, expect=-signal.SIGKILL)
        go_on.set()
        kept = [json.loads(line) for file in held_in.glob("*") for line in file.read_text().splitlines()]
        before = len(endpoint.requests)
        assert "resumes after step 4" in finish(start([sys.executable, "-m", "rpg.train", str(run)]))
        asked_again = len(endpoint.requests) - before
    for table in ("tokens", "turns", "rollouts"):
        first, again = (of_attempt(run, table, 5, attempt) for attempt in (1, 2))
        assert len(first) == len(again) > 0
        for one, other in zip(first, again, strict=True):
            assert {**one, "attempt": 2, "seconds": None} == {**other, "seconds": None}
    given = [row["text"][1:-1] for row in rows(run, "turns") if row["step"] == 6 and not row["sampled"]]
    cut = sum(row["finish_reason"] == "length" for row in rows(run, "rollouts") if row["step"] == 6)
    words = [answer[1] for *_, entry in kept for answer in entry]
    assert len(words) >= 4
    assert len([said for said in words if said not in given]) <= cut  # words that leave no room are not given
    assert 0 < asked_again <= len(given) + cut - len(words)
    assert not (run / "answers").exists()
