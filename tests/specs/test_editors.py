"""What an editor says of the specs that come with the product: nothing; and of a slip: something."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from specs.json_schema import json_schema

SPECS = ROOT / "specs"
FILES = {kind: sorted((SPECS / f"{kind}s").rglob("*.yaml")) for kind in ("experiment", "evaluation")}
FILES["study"] = sorted((SPECS / "studies").glob("*.yaml"))
SERVER = shutil.which("yaml-language-server")
"""`npm install -g yaml-language-server`"""
SLIPS = [
    ("rollout: {max_response_lenght: 32}\n", "max_response_lenght"),
    ("training: {steps: -1}\n", "-1"),
    ("objective: {type: rpg, divergence: reversed}\n", "reversed"),
    ("reward: {type: exact_matches}\n", "exact_matches"),
]


def checked(schema: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.more
@pytest.mark.parametrize("kind", FILES)
def test_every_shipped_spec_satisfies_its_schema(kind: str) -> None:
    done = checked(SPECS / "json" / f"{kind}.json", *FILES[kind])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", FILES)
def test_the_shipped_schemas_are_those_of_the_schema(kind: Any) -> None:
    assert json.loads((SPECS / "json" / f"{kind}.json").read_text()) == json_schema(kind, installed=False)


@pytest.mark.more
@pytest.mark.parametrize(("slip", "told"), SLIPS)
def test_a_slip_in_a_file_that_extends_another_is_found(slip: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"extends: quickstart.yaml\nname: a\n{slip}")
    done = checked(SPECS / "json" / "experiment.json", tmp_path / "a.yaml")
    assert done.returncode == 1
    assert told in done.stdout


def diagnoses(file: Path, text: str, schema: Path) -> list[str]:
    """What the language server, as an editor starts it, says of a file with something wrong in it."""
    assert SERVER is not None
    server = subprocess.Popen([SERVER, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(method: str, params: Any, number: Any = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params} | ({"id": number} if number else {})
        body = json.dumps(message).encode()
        server.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]

    settings = {"yaml": {"schemas": {schema.as_uri(): [file.name]}, "validate": True}}
    send("initialize", {"processId": None, "rootUri": None, "capabilities": {}}, 1)
    send("initialized", {})
    send("workspace/didChangeConfiguration", {"settings": settings})
    document = {"uri": file.as_uri(), "languageId": "yaml", "version": 1, "text": text}
    send("textDocument/didOpen", {"textDocument": document})
    try:
        while True:
            length = 0
            while (line := server.stdout.readline().strip()) or not length:
                name, _, value = line.partition(b": ")
                length = int(value) if name == b"Content-Length" else length
            message = json.loads(server.stdout.read(length))
            told = message["params"].get("diagnostics") if "params" in message else None
            if told:  # the first, before the schema is read, is empty
                return [found["message"] for found in told]
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


@pytest.mark.skipif(SERVER is None, reason="yaml-language-server is not installed")
@pytest.mark.parametrize("name", ["experiments/quickstart.yaml", "experiments/tool-use.yaml", "studies/joint.yaml"])
def test_the_language_server_finds_a_slip_in_a_shipped_spec_and_nothing_else(name: str) -> None:
    schema = SPECS / "json" / ("study.json" if "studies" in name else "experiment.json")
    (told,) = diagnoses(SPECS / name, (SPECS / name).read_text() + "questoin: Why?\n", schema)
    assert "questoin" in told


@pytest.mark.skipif(SERVER is None, reason="yaml-language-server is not installed")
def test_the_language_server_finds_a_slip_in_a_file_that_extends_another(tmp_path: Path) -> None:
    text = "extends: quickstart.yaml\nname: a\ntraining: {stepz: 1}\n"
    (told,) = diagnoses(tmp_path / "a.yaml", text, SPECS / "json" / "experiment.json")
    assert "stepz" in told
