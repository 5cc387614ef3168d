"""Interpreters of scripts, compared with the behaviour of the kernel and `env` for the same first lines."""

import os
import subprocess
from pathlib import Path

import pytest

from specs.errors import IssueError
from specs.machine.scripts import interpreters


def script(path: Path, first_line: str, then: str = "exit 7") -> str:
    path.write_bytes(f"{first_line}\n{then}\n".encode())
    path.chmod(0o755)
    return str(path)


def runs(program: str, search: str) -> bool:
    """Whether the system runs it."""
    try:
        return subprocess.run([program], env={"PATH": search}, stderr=subprocess.DEVNULL).returncode == 7
    except OSError:
        return False


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("#!/bin/sh", ["/bin/sh"]),
        ("#! \t/bin/sh -u", ["/bin/sh"]),
        ("#!{dir}/through-sh", ["{dir}/through-sh", "/bin/sh"]),
        ("#!/usr/bin/env sh", ["/usr/bin/env", "/usr/bin/sh"]),
        ("#!/usr/bin/env through-sh", ["/usr/bin/env", "{dir}/through-sh", "/bin/sh"]),
        ("#!/usr/bin/env -S A=1 sh -u", ["/usr/bin/env", "/usr/bin/sh"]),
        ("#!/usr/bin/env -Ssh -u", ["/usr/bin/env", "/usr/bin/sh"]),
        ("#!/usr/bin/env -S -i /bin/sh -u", ["/usr/bin/env"]),
        ("#!/usr/bin/env -S PATH={dir} elsewhere", ["/usr/bin/env"]),
    ],
)
def test_the_interpreters_of_a_script_that_runs_are_named(line: str, named: list[str], tmp_path: Path) -> None:
    for name in ("through-sh", "elsewhere"):
        script(tmp_path / name, "#!/bin/sh", 'exec /bin/sh "$@"')
    program = script(tmp_path / "program", line.format(dir=tmp_path))
    search = f"/usr/bin:/bin:{tmp_path}"
    assert runs(program, search)
    assert interpreters(program, search) == [each.format(dir=tmp_path) for each in named]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("#!/no/such/sh", "fix the script's first line"),
        ("#!{dir}/no-right", "fix the script's first line"),
        ("#!{dir}", "fix the script's first line"),
        ("#!", "fix the script's first line"),
        ("#!/bin/sh\r", "carriage return"),
        ("#!/usr/bin/env no-such-sh", "fix the script's first line"),
        ("#!/usr/bin/env sh\r", "carriage return"),
        ("#!/usr/bin/env sh -u", "write #!/usr/bin/env -S sh -u"),
        ("#!/usr/bin/env -S no-such-sh -u", "fix the script's first line"),
        ("#!{dir}/lost", "fix the script's first line"),
    ],
)
def test_a_script_whose_interpreter_is_not_here_is_told_with_its_first_line(
    line: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "no-right").touch(0o644)
    script(tmp_path / "lost", "#!/no/such/sh")
    program = script(tmp_path / "program", line.format(dir=tmp_path))
    assert not runs(program, "/usr/bin:/bin")
    with pytest.raises(IssueError) as raised:
        interpreters(program, "/usr/bin:/bin")
    issue = raised.value.issue
    guilty = tmp_path / ("lost" if line.endswith("lost") else "program")
    assert issue.given.startswith(f"{guilty} begins with #!")
    assert "\r" not in issue.given
    assert hint in (issue.hint or "")


def test_a_program_that_is_no_script_or_names_itself_has_no_other(tmp_path: Path) -> None:
    assert interpreters(os.path.realpath("/bin/sh"), "/usr/bin:/bin") == []
    itself = script(tmp_path / "itself", f"#!{tmp_path / 'itself'}")
    assert interpreters(itself, "/usr/bin:/bin") == [itself]
