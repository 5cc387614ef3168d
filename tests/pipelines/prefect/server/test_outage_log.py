"""An outage is one line in the logs of a server and of a worker; any other error keeps its traceback."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError

import pytest
from guarded import Server

from pipelines.home.home import Home
from pipelines.prefect.server.settings import server_environment

PROGRAM = """
import logging
import traceback
from pipelines.prefect.server import outage_log

outage_log.install()
logging.basicConfig(format="%(name)s: %(message)s")
for part in ("events", "queue", "events"):
    try:
        try:
            raise ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 6379)")
        except OSError as error:
            raise ExceptionGroup("unhandled errors", [error]) from None
    except ExceptionGroup:
        logging.getLogger(part).exception("Error in loop")
try:
    {}["missing"]
except KeyError:
    logging.getLogger("events").exception("Error in loop")
text = "Traceback (most recent call last):\\n  File ...\\nredis.exceptions.ConnectionError: Error 111"
logging.getLogger("lifespan").error("failed\\n" + text)
try:
    raise TimeoutError("not at the end either")
except TimeoutError:
    traceback.print_exc()
raise TimeoutError("no answer")
"""


def test_an_outage_is_one_line_once_a_minute_and_another_error_keeps_its_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    refused = "ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', 6379)"
    assert lines[0] == f"events: Error in loop: {refused}"
    assert lines[1:3] == ["events: Error in loop", "Traceback (most recent call last):"]
    assert lines[-4:] == [
        "KeyError: 'missing'",
        "lifespan: failed: redis.exceptions.ConnectionError: Error 111",
        "TimeoutError: not at the end either",
        "TimeoutError: no answer",
    ]
    assert done.returncode == 1


FAULTS = """
import logging
from pipelines.prefect.server import outage_log

outage_log.install()
try:
    open("/no/such/file")
except OSError:
    logging.getLogger("a file").exception("failed")
try:
    try:
        raise ConnectionRefusedError("away")
    except OSError:
        {}["missing"]
except KeyError:
    logging.getLogger("a handler").exception("failed")
try:
    try:
        raise ConnectionRefusedError("away")
    except OSError as error:
        raise RuntimeError("the server is away") from error
except RuntimeError:
    logging.getLogger("a client").exception("failed")
try:
    raise OSError(113, "No route to host")
except OSError:
    logging.getLogger("a network").exception("failed")
try:
    raise OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed")
except OSError:
    logging.getLogger("two addresses").exception("called")
text = "Traceback (most recent call last):\\n  File ...\\nFileNotFoundError: no such file\\nDiskOSError: full"
logging.getLogger("a text").error("failed\\n" + text)
"""


def test_a_fault_keeps_its_traceback_though_it_is_of_a_file_or_came_while_an_outage_was_handled() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'" in lines
    assert "KeyError: 'missing'" in lines
    assert lines.count("Traceback (most recent call last):") == 4  # the file, the handler and what it handled, the text
    assert "failed: RuntimeError: the server is away" in lines
    called = "called: OSError: Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed"
    assert lines[-7:-4] == ["failed: OSError: [Errno 113] No route to host", called, "failed"]


@pytest.mark.more
def test_a_server_whose_database_is_lost_says_so_in_one_line(tmp_path: Path) -> None:
    server = Server(Home(tmp_path))
    try:
        said = server.log.stat().st_size
        with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
            database.execute("alter table flow_run rename to gone")
        for _ in range(5):
            with pytest.raises(HTTPError) as refused:
                server.call("/flow_runs/filter", {})
            refused.value.close()
    finally:
        server.stop()
    lines = server.log.read_text()[said:].splitlines()
    assert not any("Traceback" in line for line in lines)
    assert sum("no such table: flow_run" in line for line in lines) == 1
    assert len(lines) < 20


@pytest.mark.more
def test_every_part_of_a_server_is_told_where_redis_is(tmp_path: Path) -> None:
    told = server_environment(Home(tmp_path), "http://h/api", database="d", redis=":p@127.0.0.1:7000", auth_string="")
    program = (
        "from prefect_redis.cleanup_queue import RedisWorkerCleanupQueueSettings as Queue;"
        " from prefect_redis.client import RedisMessagingSettings as Messages; print(Queue().url, Messages().url)"
    )
    pytest.importorskip("prefect_redis")
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | told, capture_output=True, text=True)
    assert done.stdout.split() == ["redis://:p@127.0.0.1:7000/0"] * 2, done.stderr
