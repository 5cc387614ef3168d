"""What programs, sessions and sealed commands find of the packages with problems and scorers, as JSON. Run by
test_hidden_packages.py with the interpreter that is to be looked at; it needs nothing but `rpg.sandbox`."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from rpg.sandbox import Limits, Program, Sandbox, start

MODULES = ["rpg", "specs", "storage", "pipelines", "reasoning_gym", *sys.argv[1:]]
LOOK = """
import importlib.metadata, importlib.util, json, os, sys

def opened(path):
    try:
        return bool(open(path, "rb").read())
    except OSError:
        return False

found = []
for name in MODULES:
    spec = importlib.util.find_spec(name)
    if spec and spec.origin:  # an empty directory is a package without one
        found.append("import " + name)
found += [path for path in PLACES if opened(path)]
found += ["installed " + each.name for each in importlib.metadata.distributions() if each.name in DISTRIBUTIONS]
for entry in ("rpg.data", "rpg.rewards"):
    found += [f"offers {each.value}" for each in importlib.metadata.entry_points(group=entry)]
print(json.dumps(found + ["nothing to import"] * ("site" not in sys.modules)))
"""


def main() -> None:
    places = [find_spec(name) for name in MODULES]
    files = [Path(spec.origin) for spec in places if spec and spec.origin]
    files += [file for each in files for file in (each.parent / "__pycache__").glob("__init__.*")]
    assert len(files) >= len(MODULES), files
    assert {entry.module.partition(".")[0] for entry in entry_points(group="rpg.data")} >= set(sys.argv[1:])
    known = {
        "MODULES": MODULES,
        "PLACES": [*map(str, files)],
        "DISTRIBUTIONS": ["rpg-experiments", "reasoning-gym", *sys.argv[1:]],
    }
    text = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + LOOK
    found = {"outside": json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True).stdout)}
    with Sandbox(Limits(seconds=60.0, processes=8), at_once=1) as sandbox:
        found["a program"] = json.loads(sandbox.run(Program(text)).stdout)
        asked = f"import subprocess, sys\nsubprocess.run([{sys.executable!r}, '-c', sys.stdin.read()])"
        found["a program's child"] = json.loads(sandbox.run(Program(asked, text)).stdout)
        with sandbox.session() as session:
            found["a session"] = json.loads(session.execute(text).stdout)
    for readable in ([], [Path(sys.prefix)]):
        command = start(
            [sys.executable, "-c", text],
            sealed=True,
            hides=True,
            readable=readable,
            limits=Limits(processes=0),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        found[f"a sealed command, {len(readable)} readable"] = json.loads(command.stdout.read())
        command.end()
    print(json.dumps(found))


if __name__ == "__main__":
    os.chdir("/")
    main()
