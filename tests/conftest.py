"""What tests of several packages begin with."""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelines.processes import forking
from specs.machine.collecting import collect_rarely
from tests.forks import use_imports
from tests.needs import skip_without

SLOWEST_FILES = 10
"""Files of tests that the end of a suite names."""


def pytest_configure() -> None:
    """The garbage collector looks as rarely as in a command: it would take a tenth of the tests' time."""
    collect_rarely()


def pytest_collection_finish() -> None:
    """Modules imported by now live on: they are not looked through again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the files whose tests took longest, including set-up, if there were more files than this names."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > SLOWEST_FILES:
        terminalreporter.section(f"slowest {SLOWEST_FILES} files")
        for name, took in sorted(seconds.items(), key=lambda of_file: -of_file[1])[:SLOWEST_FILES]:
            terminalreporter.write_line(f"{took:7.1f} s  {name}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose Debian packages are missing."""
    for mark in item.iter_markers("needs"):
        skip_without(*mark.args)


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def environment_of_module() -> Iterator[None]:
    """What a library leaves in the environment when it is imported or opened, as vLLM, Ray and PyTorch do, ends with
    the file of tests: what is forked for the next one would not fit, and import everything anew."""
    with _environment_kept():
        yield


@pytest.fixture(scope="module", autouse=True)
def forks_of_module() -> Iterator[None]:
    """A command in this process looks in a fork where an earlier one has asked for one: earlier files do not count."""
    yield
    forking._has_forked = False


@pytest.fixture(autouse=True)
def environment_of_test() -> Iterator[None]:
    """Each test gives the environment back too; a file's fixtures keep there what they have set."""
    with _environment_kept():
        yield


@pytest.fixture
def modules_forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules of packages that a test installs for itself go with it: another test's may have the same names."""
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def signals_arrive() -> Iterator[None]:
    """SIGINT and SIGHUP end what a test starts, also where `nohup` or a script's `&` has them ignored for the tests.

    A program begins with a handler's signal as by default, and with an ignored one ignored. This process ignores them:
    its own handler does nothing.
    """
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def stages_imported(request: pytest.FixtureRequest) -> None:
    """Commands called in this process fork their stages from the server of the tests, which one file after another
    uses. What tests that server begins its own."""
    if "test_fork" not in request.path.name:
        use_imports()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny base model and its data: see tests/rpg/tiny_run.py."""
    from tests.rpg.tiny_run import make_inputs

    directory = tmp_path_factory.mktemp("inputs")
    make_inputs(directory)
    return directory
