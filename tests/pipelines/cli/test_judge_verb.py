"""Judges on the command line: mistakes with their line, the plan's text on them, and their agreement with labels."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from live import SPEC

from pipelines.cli import main
from pipelines.home.home import Home
from pipelines.planning.calibration import trust_in
from specs import load_experiment
from tests.rpg.rewards.judge_endpoint import answer_in, judging, verdict

ENDPOINT = "http://127.0.0.1:9/v1"
JUDGE = f'type: judge, model: fair, endpoint: "{ENDPOINT}", rubric: Is it right?'
SCALE = "scale: {low: 1, high: 5}"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rpg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line with a reward in the spec."""

    def call(arguments: str, reward: str) -> tuple[int, str, str]:
        (tmp_path / "spec.yaml").write_text(SPEC.replace("type: exact_match", reward))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RPG_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(sys, "argv", ["rpg", *shlex.split(arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err.replace(str(tmp_path), "DIR")

    return call


MISTAKES = {
    "a judge without a scale": (
        "validate",
        JUDGE,
        """\
spec.yaml:28: reward.scale: missing
    28 | reward: {JUDGE}
  allowed: the fields high, low
  hint: Range of its verdicts.
1 error; nothing was run
""",
    ),
    "a key that is not set": (
        "plan",
        f"{JUDGE}, {SCALE}, key: env:NO_SUCH_KEY",
        """\
spec.yaml:28: reward.key: key is env:NO_SUCH_KEY, and there is no variable NO_SUCH_KEY on this machine
    28 | reward: {JUDGE}
  given: env:NO_SUCH_KEY
  hint: set it on the machine that scores
1 error; nothing was run
""",
    ),
    "a key in the spec": (
        "validate",
        f"{JUDGE}, {SCALE}, key: sk-abcdefghijklmnopqrst",
        """\
spec.yaml:28: reward.key: give a reference to the secret, not the secret itself
    28 | (hidden)
  given: (hidden)    allowed: env:NAME or file:/PATH, which is read when it is used
  hint: a spec is stored and shared; keep it in a variable or a file
1 error; nothing was run
""",
    ),
    "a model that is no classifier": (
        "plan",
        "type: reward_model, path: model",
        """\
spec.yaml:28: reward.path: the model has no classification head
    28 | reward: {JUDGE}
  given: DIR/model: Qwen3ForCausalLM    allowed: a model with a classification head: ...ForSequenceClassification
  hint: a model that writes is a judge: reward.type: judge
1 error; nothing was run
""",
    ),
    "a judge that compares what one policy says": (
        "validate",
        f"{JUDGE}, {SCALE}, compare: pairs",
        """\
spec.yaml:28: reward: a judge that compares responses within a group cannot measure a policy
    28 | reward: {JUDGE}
  given: used for the evaluation set held_out
  hint: write compare: each, or give the evaluation sets a reward of their own
1 error; nothing was run
""",
    ),
    "labels that are none": (
        "judge calibrate",
        f"{JUDGE}, {SCALE}, labels: labels.jsonl",
        """\
DIR/labels.jsonl:2: the label is not on the judge's scale from 1 to 5
    2 | {"prompt": "1 + 2", "response": "3", "label": 7}
  given: {"prompt": "1 + 2", "response": "3", "label": 7}
DIR/labels.jsonl:3: cannot be read: not JSON: Expecting value at character 1
    3 | no
  given: no
DIR/labels.jsonl:4: cannot be read: half a character: \\ud83d without its other half
    4 | {"prompt": "\\ud83d", "response": "2", "label": 5}
  given: {"prompt": "\\ud83d", "response": "2", "label": 5}
DIR/labels.jsonl:5: cannot be read: the key "label" twice in one object
    5 | {"prompt": "1", "response": "2", "label": 5, "label": 1}
  given: {"prompt": "1", "response": "2", "label": 5, "label": 1}
4 errors; nothing was run
""",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line(mistake: str, rpg: Call, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "labels.jsonl").write_text(
        '{"prompt": "1 + 1", "response": "2", "label": 5}\n{"prompt": "1 + 2", "response": "3", "label": 7}\nno\n'
        '{"prompt": "\\ud83d", "response": "2", "label": 5}\n{"prompt": "1", "response": "2", "label": 5, "label": 1}\n'
    )
    verb, reward, said = MISTAKES[mistake]
    code, _, errors = rpg(f"{verb} spec.yaml", reward)
    assert (code, errors[errors.index(said[:10]) :]) == (2, said.replace("{JUDGE}", f"{{{reward}}}"))


def test_an_endpoint_that_does_not_answer_is_a_finding_of_the_doctor(rpg: Call) -> None:
    code, out, _ = rpg("doctor spec.yaml --json", f"{JUDGE}, {SCALE}")
    (found,) = [finding for finding in json.loads(out) if finding["name"] == "judge"]
    assert code == 1
    assert found["status"] == "broken"
    assert found["message"] == f"{ENDPOINT}: does not answer (ConnectError); fair"


def test_a_plan_says_what_a_judge_will_cost(rpg: Call) -> None:
    priced = f"{JUDGE}, {SCALE}, max_tokens: 100, votes: 2, temperature: 1, price: {{input: 1, output: 100}}"
    code, out, _ = rpg("plan spec.yaml --json", f"{priced}, budget: {{calls: 50}}")
    (judge,) = json.loads(out)["runs"][0]["judges"]
    # 6 steps of 4 prompts x 4 responses x 2 votes; of each the rubric (3), our words (200), 16 and 4 tokens.
    assert code == 0
    assert (judge["calls"], judge["question_tokens"], judge["reply_tokens"]) == (192, 192 * 223, 19200)
    assert judge["money"] == pytest.approx((192 * 223 * 1 + 19200 * 100) / 1e6)
    assert judge["bound"] == "50 calls"


def test_a_judge_is_held_against_labels_and_reports_say_how_it_agrees(rpg: Call, tmp_path: Path) -> None:
    # The judge says 5 of long answers and 1 of short ones: right on 3 of the 4.
    rows = [("a", "long enough", 5), ("b", "no", 1), ("c", "long as well", 5), ("d", "ok", 5)]
    labels = [{"prompt": prompt, "response": text, "label": label} for prompt, text, label in rows]
    (tmp_path / "labels.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in labels))
    with judging(lambda request: verdict(request, 5 if len(answer_in(request)) > 2 else 1)) as endpoint:
        reward = f'type: judge, model: fair, endpoint: "{endpoint.url}", rubric: Is it right?, {SCALE}'
        code, out, errors = rpg("judge calibrate spec.yaml --json", f"{reward}, labels: labels.jsonl")
        assert code == 0, errors
    (record,) = json.loads(out)
    # By chance 2/4 * 3/4 + 2/4 * 1/4 = 1/2, so that kappa is (3/4 - 1/2) / (1/2).
    assert (record["agreement"]["value"], record["kappa"]["value"]) == (0.75, 0.5)
    assert record["kappa"]["low"] < 0.5 < record["kappa"]["high"]
    assert record["leniency"]["value"] == -1.0  # (1 - 5) / 4
    assert record["length"]["value"] > 0
    home, spec = Home(tmp_path / "home"), load_experiment("spec.yaml", [f"reward.endpoint={ENDPOINT}"])
    assert trust_in(home, iter([spec, spec])).startswith("The judge fair agrees with labels on 0.75 [")
    other = load_experiment("spec.yaml", ["reward.rubric=Is it long?"])
    assert "has not been compared with labels" in trust_in(home, iter([other]))
