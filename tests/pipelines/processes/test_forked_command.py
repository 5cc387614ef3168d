"""A forked command of the tests looks to others like a command that imports by itself."""

import pytest
from live import Lab, finished
from waiting import wait_for

from pipelines.processes.forking import may_fork
from tests.forks import Fork

needs_forks = pytest.mark.skipif(not may_fork(), reason="processes of this machine may not be forks")


@pytest.mark.more
@needs_forks
def test_a_forked_command_answers_as_one_that_begins_anew(lab: Lab) -> None:
    forked, new = lab.start("runs"), lab.start("runs", anew=True)
    assert isinstance(forked, Fork)
    assert not isinstance(new, Fork)
    assert finished(forked) == finished(new)


@needs_forks
def test_a_forked_command_and_what_it_starts_show_their_home_and_their_words(lab: Lab) -> None:
    command = lab.start("report", "--serve")
    assert isinstance(command, Fork)

    def shown() -> dict[int, str]:
        return {process.pid: " ".join(process.cmdline()) for process in lab.processes()}

    wait_for(lambda: "rpg report --serve" in shown().get(command.pid, ""), what="its words")
    assert len(shown()) > 1, "the process that its stages would be forks of is the home's too"
    command.kill()
    command.wait()
    wait_for(lambda: not shown(), what="the end of what it has started")
