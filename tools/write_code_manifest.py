"""Writes the manifest of the released code, pipelines/planning/released_code.json, after a change of code.

    python tools/write_code_manifest.py                     says which modules have changed, and which stages reach them
    python tools/write_code_manifest.py --same-results      they give the same results: what is recorded stays valid
    python tools/write_code_manifest.py --other-results train evaluate    these stages give other results: their numbers
                                                            are raised, and what is recorded of them is made anew

Versions of libraries that decide a score are kept as they were first written: another version is another result.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipelines.planning.code import ENTRIES, MANIFEST, ROOT, Code, Module, Release, installed
from specs.extensions import our_names, variants
from specs.schema.base import OpenSection

EMPTY = Release("", {}, {}, {})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    said = parser.add_mutually_exclusive_group()
    said.add_argument("--same-results", action="store_true", help="the changes change no result")
    said.add_argument("--other-results", nargs="+", choices=tuple(ENTRIES), metavar="STAGE", help="these do change")
    options = parser.parse_args()
    before = Release.read() if MANIFEST.exists() else EMPTY
    after = current(before)
    changed = list(changes(before, after))
    print(*changed, sep="\n", end="\n" if changed else "")
    if changed and not (options.same_results or options.other_results):
        sys.exit("say --same-results or --other-results STAGE...")
    raised = {stage: number + (stage in (options.other_results or ())) for stage, number in after.results.items()}
    write(Release(after.version, raised, after.libraries, after.modules))


def current(before: Release) -> Release:
    """The code as it stands, with the numbers and the pinned libraries of the release before."""
    code = Code(released=EMPTY)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    names = sorted(code.reach(*(name for stage in ENTRIES for name in entries(stage))))
    libraries = sorted(
        {library for kind in kinds() for each in variants(kind, installed=False).values() for library in each.libraries}
    )
    pinned = {name: before.libraries.get(name) or installed(name) for name in libraries}
    results = {stage: before.results.get(stage, 1) for stage in ENTRIES}
    return Release(version, results, pinned, {name: code.parsed(name) for name in names})


def kinds() -> list[type[OpenSection]]:
    """The kinds of open sections."""
    import specs.loader  # noqa: F401 (it imports the whole schema)

    return sorted((kind for kind in OpenSection.__subclasses__() if "group" in vars(kind)), key=lambda kind: kind.group)


def entries(stage: str) -> list[str]:
    """The modules in which a stage's work may begin, whatever the spec names."""
    ours = {kind.package: our_names(kind.package) for kind in kinds()}
    sources = [
        f"{package}.{name}" for package, names in ours.items() for name in names if package == "rpg.data.sources"
    ]
    others = [f"{package}.{name}" for package, names in ours.items() for name in names if package != "rpg.data.sources"]
    samplers = ["rpg.samplers.transformers", "rpg.samplers.vllm"]
    named = {"data": sources, "train": [*others, *samplers], "evaluate": [*others, *samplers]}
    return [*ENTRIES[stage], *named.get(stage, ())]


def changes(before: Release, after: Release) -> Iterator[str]:
    """A line for each module that counts as another one: its name, and the stages that reach it."""
    code, released = Code(released=EMPTY), Code(released=before)
    reach = {stage: code.reach(*entries(stage)) for stage in ENTRIES}
    differing = {file for stage in ENTRIES for file in released.differing(*entries(stage))}
    for name in after.modules:
        if (file := code.file_name(name)) in differing:
            yield f"{file}: {', '.join(stage for stage in ENTRIES if name in reach[stage])}"


def write(release: Release) -> None:
    """One line a module, so that changes of several authors merge."""

    def plain(module: Module) -> str:
        return json.dumps([module.content, module.tree, list(module.imports)])

    modules = ",\n".join(f"  {json.dumps(name)}: {plain(module)}" for name, module in sorted(release.modules.items()))
    head = {"version": release.version, "results": release.results, "libraries": release.libraries}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    MANIFEST.write_text(f'{{\n{lines},\n "modules": {{\n{modules}\n }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
