"""Writes pipelines/planning/release.json for a release: its version, and the digests of the code as it stands.

Results numbers stay as they are in the file: a change after which the same spec gives another result raises the number
of its stage there. Versions of libraries that decide a score stay as they were first written.
"""

import json
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipelines.planning.code import ENTRIES, RELEASE, ROOT, Code, installed, release
from specs.extensions import our_names, variants
from specs.schema.base import OpenSection
from specs.schema.rollout import SamplerSection, engine_of


def main() -> None:
    """See the module."""
    import specs.loader  # noqa: F401 (it imports the whole schema)

    code, known = Code(), release()
    kinds = [kind for kind in OpenSection.__subclasses__() if "group" in vars(kind)]
    parts = [f"{kind.package}.{name}" for kind in kinds for name in our_names(kind.package)]
    parts += [f"rpg.samplers.{engine_of(section)}" for section in SamplerSection.__subclasses__()]
    libraries = {name for kind in kinds for each in variants(kind, installed=False).values() for name in each.libraries}
    content = {
        "version": tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        "results": known.results,
        "libraries": {name: known.libraries.get(name) or installed(name) for name in sorted(libraries)},
        "code": {entry: code.digest(entry) for entry in sorted({*ENTRIES.values(), *parts})},
    }
    RELEASE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
