"""What counts as a secret, how a spec refers to one, and that its value does not come out again."""

import base64
import json
from urllib.parse import quote

import pytest
from spec_text import GOOD, message, write

from specs.document import Document
from specs.loader import load_document, load_experiment
from specs.secrets import (
    HIDDEN,
    NAMES,
    SecretError,
    hide,
    is_reference,
    looks_secret,
    masked,
    resolved,
    secrets_in,
    variable_of,
)

CANARY = "canary-7f3b9a20c4"
LAUNCHER = "launcher: {{type: ray, environment: {{{0}}}}}\n"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", CANARY),
        ("WANDB_API_KEY", CANARY),
        ("PGPASSWORD", CANARY),
        ("AWS_SECRET_ACCESS_KEY", CANARY),
        ("PREFECT_API_AUTH_STRING", "admin:" + CANARY),
        ("SMTP_PASS", CANARY),
        ("DB_PWD", CANARY),
        ("AZURE_CREDENTIALS", CANARY),
        ("DB_PASSWORD", "20261122"),
        ("anything", "hf_" + "a" * 34),
        ("anything", "ghp_" + "a" * 36),
        ("anything", "sk-proj-" + "a" * 40),
        ("anything", "https://hooks.slack.com/services/T0/B0/x"),
        ("GITHUB_PAT", CANARY),
        ("AZURE_DEVOPS_PAT", CANARY),
        ("STORE", "postgresql://rpg:hunter22@db/rpg"),
        ("STORE", "postgresql://rpg:hun/ter22@db/rpg"),
        ("STORE", "redis://:hun/te?r#22@db:6379/0"),
    ],
)
def test_names_and_shapes_of_secrets_are_known(name, value):
    assert looks_secret(name, value)
    assert masked({name: value}) == {name: HIDDEN}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "disabled-everywhere"),
        ("VLLM_MAX_TOKENS", "a-long-enough-value"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("HF_TOKEN_PATH", "/shared/token-of-the-lab"),
        ("AWS_ACCESS_KEY_ID", "not-secret-by-itself"),
        ("SORT_KEY", "12345678901"),
        ("PWD", "/home/somebody/work"),
        ("OLDPWD", "/home/somebody/work"),
        ("GPU_BYPASS", "a-long-enough-value"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/run/secrets/google.json"),
        ("NCCL_SOCKET_IFNAME", "interface-0"),
        ("HF_TOKEN", "env:HF_TOKEN"),
        ("HF_TOKEN", "file:/run/secrets/hf"),
        ("STORE", "postgresql://db/rpg"),
        ("PROXY", "http://proxy:3128/packages/@scope"),
        ("ADAPT", "a-long-enough-value"),
        ("PAT_FILE", "/run/secrets/pat"),
    ],
)
def test_ordinary_values_are_no_secrets(name, value):
    assert not looks_secret(name, value)


def test_references_name_a_variable_or_a_file_and_a_url_is_none(tmp_path):
    assert is_reference("env:HF_TOKEN")
    assert variable_of("env:HF_TOKEN") == "HF_TOKEN"
    assert not is_reference("env:1")
    assert not is_reference("file:///shared/rendezvous")
    (tmp_path / "token").write_text(f"{CANARY}\n")
    values = {"A": "env:B", "C": f"file:{tmp_path}/token", "D": "plain"}
    got = resolved(values, {"B": "from-b", NAMES: "Z"})
    assert got == {"A": "from-b", "C": CANARY, "D": "plain", NAMES: "Z,A,C"}
    assert hide(f"{CANARY} from-b plain", got) == f"{HIDDEN} from-b plain"


@pytest.mark.parametrize(
    "value", ["env:NOT_SET_ANYWHERE", "file:/no/such/file", "file:~nobody-at-all/x", "file:/dev/zero"]
)
def test_a_reference_that_leads_nowhere_says_which_variable_wants_it(value):
    with pytest.raises(SecretError, match=r"^HF_TOKEN is (env|file):.*this machine"):
        resolved({"HF_TOKEN": value}, {})


def test_every_way_to_write_a_secret_is_hidden():
    secret = 'a "quoted"\nkey/é+1'
    for text in (secret, json.dumps({"k": secret}), quote(secret, safe=""), repr(secret)):
        assert "quoted" not in hide(f"before {text} after", {"MY_TOKEN": secret})
    assert hide("psycopg: hunter22 refused", {"URL": "postgresql://rpg:hunter22@db/x"}) == f"psycopg: {HIDDEN} refused"
    for password in ("hun/ter22", "hun@ter22", "hun/t@r?22#"):
        urls = {"URL": f"postgresql://rpg:{password}@db/x?user=a@b"}
        assert hide(f"psycopg: {password} refused", urls) == f"psycopg: {HIDDEN} refused"
    assert hide("step 1 of 12345678", {"A_TOKEN": "1", "B_TOKEN": "12345678"}) == "step 1 of 12345678"
    assert secrets_in({"A_TOKEN": "short", "PATH": "/usr/bin:/bin"}) == []


def test_each_password_of_a_value_is_hidden_by_itself_too():
    auth = {"PREFECT_API_AUTH_STRING": f"admin:{CANARY}"}
    header = base64.b64encode(f"admin:{CANARY}".encode()).decode()
    for text in (f"refused {CANARY}", f"authorization: Basic {header}", f"admin:{CANARY}"):
        assert CANARY not in hide(text, auth)
        assert header not in hide(text, auth)
    urls = {"BROKERS": "redis://:first-password@a/0,redis://rpg:second-password@b/0"}
    assert hide("first-password and second-password", urls) == f"{HIDDEN} and {HIDDEN}"


def test_a_secret_that_stands_in_the_spec_is_refused_at_its_line_and_not_repeated():
    text = message(GOOD + LAUNCHER.format(f"HF_TOKEN: {CANARY}"))
    assert "spec.yaml:" in text
    assert "launcher.environment.HF_TOKEN: the spec contains a secret, but specs are stored and shared" in text
    assert "allowed: env:NAME or file:/PATH, e.g. env:HF_TOKEN" in text
    assert CANARY not in text
    assert load_experiment(write(GOOD + LAUNCHER.format("HF_TOKEN: env:HF_TOKEN"))).launcher.environment == {
        "HF_TOKEN": "env:HF_TOKEN"
    }


def test_a_document_that_an_earlier_version_froze_with_its_secret_still_opens():
    frozen = load_document(write(GOOD + LAUNCHER.format("HF_TOKEN: env:HF_TOKEN"))).to_json()
    frozen["source"]["launcher"]["environment"]["HF_TOKEN"] = CANARY
    assert Document.from_json(frozen).experiment.launcher.environment == {"HF_TOKEN": CANARY}


@pytest.mark.parametrize("name", ["A=1; touch X; export B", "", "1A", "A-B", "A B", "A\\nB", "É"])
def test_a_variable_has_the_name_of_one(name):
    text = message(GOOD + LAUNCHER.format(f'"{name}": x'))
    assert "is not the name of a variable" in text


def test_a_value_that_no_variable_can_hold_is_refused():
    assert "NUL" in message(GOOD + LAUNCHER.format('A: "a\\0b"'))
