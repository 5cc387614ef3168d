"""A process's output reaches its log completely and in order, less the secrets."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from specs.machine.redacted_log import redact_log_records, redacted_log
from specs.secrets import HIDDEN

CANARY = "canary-7f3b9a20c4"
ENVIRONMENT = {"MY_TOKEN": CANARY}


def test_a_secret_is_hidden_however_its_bytes_arrive(tmp_path: Path) -> None:
    code = f"""
import os, time
for letter in {f"begin {CANARY} end {CANARY[:5]}"!r}:
    os.write(1, letter.encode())
    time.sleep(0.002)
"""
    with redacted_log(tmp_path / "log", ENVIRONMENT) as output:
        subprocess.run([sys.executable, "-c", code], stdout=output, check=True)
    assert (tmp_path / "log").read_text() == f"begin {HIDDEN} end {CANARY[:5]}"


def test_a_large_output_loses_nothing_and_is_appended(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("earlier\n")
    code = f"import sys\nfor number in range(20000): print(number, {CANARY!r})"
    with redacted_log(tmp_path / "log", ENVIRONMENT) as output:
        subprocess.run([sys.executable, "-c", code], stdout=output, check=True)
    assert (tmp_path / "log").read_text() == "earlier\n" + "".join(f"{number} {HIDDEN}\n" for number in range(20000))


def test_what_was_printed_can_be_read_while_the_process_still_runs(tmp_path: Path) -> None:
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with redacted_log(tmp_path / "log", ENVIRONMENT) as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output)
        for _ in range(500):
            if (tmp_path / "log").read_text() == "ready\n":
                break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.02)
        assert (tmp_path / "log").read_text() == "ready\n"
        process.communicate()


def test_without_a_secret_the_process_writes_to_the_log_itself(tmp_path: Path) -> None:
    with redacted_log(tmp_path / "log", {"A": "b"}) as output:
        assert output.name == str(tmp_path / "log")


def test_logging_tells_no_secret_in_messages_arguments_or_tracebacks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", CANARY)
    before = logging.getLogRecordFactory()
    redact_log_records()
    try:
        logging.getLogger("any").warning("refused: %s", CANARY)
        try:
            raise ValueError(f"401 for {CANARY}")
        except ValueError:
            logging.getLogger("any").exception("failed")
    finally:
        logging.setLogRecordFactory(before)
    assert CANARY not in caplog.text
    assert f"refused: {HIDDEN}" in caplog.text
    assert f"ValueError: 401 for {HIDDEN}" in caplog.text
