#!/usr/bin/env python3
"""Counts turns of phrase at which a reader stops: in docstrings, comments and messages of Python, in prose of Markdown.

    tools/plain_english.py [--show N] PATH...   # hits per 1,000 words of a package, a file or a folder
    tools/plain_english.py --check              # fails if a file has more hits than plain_english.json allows
    tools/plain_english.py --lower              # writes the counts that have fallen into plain_english.json

A hit is a place to look at; some are right as they stand. Joining sentences or lines to lower the count is no fix.
"""

import argparse
import ast
import io
import json
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "tools" / "plain_english.json"
"""File -> hits that it may have. A file that is not listed may have none."""
CHECKED = (
    "pipelines",
    "rpg",
    "specs",
    "storage",
    "tests",
    "benchmarks",
    "docs",
    "tools",
    "README.md",
    "CONTRIBUTING.md",
)
PATTERNS = {
    "clause for a noun": (
        r"\b(what|whoever|who) (is|was|has|it|they|a|the|of|made|asks|ended|comes|goes|that|one|there)\b"
    ),
    "are none": r"\b(is|are) none\b",
    "anew, aside, in vain": r"\b(anew|aside|in vain|at last|thereof)\b",
    "begins with Of": r"(^|[.;:] )Of (a|an|the|each|several|those|one|what|ours|all)\b",
    "so many, so long": r"\bso (many|long|few)\b",
    "is said, is told": r"\b(is|are) (said|told)\b",
    "where there is": r"\bwhere (there|a|an|the|it|that|no|nothing|one|none|nobody|they)\b",
    "nobody, whoever": r"\b(nobody|anybody|whoever)\b",
    "held against": r"\bheld (against|to)\b",
    "goes on": r"\bgo(es)? on\b",
    "mend, spelt, heed, reckon": r"\b(mend|mended|mends|spelt|heed|reckon\w*)\b",
    "; empty: none": r"; (empty|None|0|0\.0): (no|it|there|a|the|none|all|what|nobody)",
    "as of, but for": r"\b(as of (a|the|one)|but for (the|a|those|what))\b",
    "comes to, be it": r"\b(comes to be|be it|lets? be|let go)\b",
}
COMPILED = {name: re.compile(pattern, re.IGNORECASE | re.MULTILINE) for name, pattern in PATTERNS.items()}
FEWEST_WORDS = 4
"""Words of a string or comment that count as a sentence."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text: docstrings, strings under fields, comments and messages of Python, prose of Markdown."""
    source = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced and line.strip() and not line.startswith("<!--"):
                yield number, re.sub(r"`[^`]*`|\([^)]*\)", " ", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= FEWEST_WORDS:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string.split()) >= FEWEST_WORDS:
            yield token.start[0], token.string.lstrip("# ")


def hits(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yields line, text and names of the patterns found, for each text of a file with at least one."""
    for line, text in texts(path):
        if found := [name for name, pattern in COMPILED.items() if pattern.search(text)]:
            yield line, text, found


def files(path: Path) -> Iterator[Path]:
    """Yields the Python and Markdown files below a path, without this one: its patterns would count."""
    for found in [path] if path.is_file() else sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in found.relative_to(path).parts)
        if found.suffix in (".py", ".md") and not hidden and found.resolve() != Path(__file__).resolve():
            yield found


def counts() -> dict[str, int]:
    """Returns the hits of each checked file that has any, by its path from the root."""
    checked = (file for name in CHECKED for file in files(ROOT / name))
    counted = {str(file.relative_to(ROOT)): sum(1 for _ in hits(file)) for file in checked}
    return {file: count for file, count in sorted(counted.items()) if count}


def check() -> int:
    """Prints the hits of each file that has more than it is allowed. Returns the exit code."""
    allowed = json.loads(ALLOWED.read_text(encoding="utf-8"))
    risen = {file: count for file, count in counts().items() if count > allowed.get(file, 0)}
    for file, count in risen.items():
        print(f"{file}: {count} hits, {allowed.get(file, 0)} allowed; write one of these in plainer words:")
        for line, text, found in hits(ROOT / file):
            print(f"  {file}:{line}: [{', '.join(found)}] {' '.join(text.split())[:120]}")
    return 1 if risen else 0


def lower() -> None:
    """Writes the counts of today where they are lower, and drops files that are gone; a new file is allowed none."""
    now = counts()
    before = json.loads(ALLOWED.read_text(encoding="utf-8")) if ALLOWED.exists() else now
    lowered = {file: min(count, now[file]) for file, count in before.items() if file in now}
    ALLOWED.write_text(json.dumps(lowered, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def report(path: Path, shown: int) -> None:
    """Prints the density of a path, its commonest patterns and a sample of its hits."""
    words = found = 0
    by_pattern, places = Counter[str](), list[str]()
    for file in files(path):
        words += sum(len(text.split()) for _, text in texts(file))
        for line, text, names in hits(file):
            found += 1
            by_pattern.update(names)
            places += [f"  {file}:{line}: [{name}] {' '.join(text.split())[:150]}" for name in names]
    print(f"{path}: {1000 * found / max(words, 1):.1f} per 1,000 words ({found} texts, {words} words)")
    for name, count in by_pattern.most_common(5):
        print(f"    {count:5d}  {name}")
    for place in random.Random(0).sample(places, min(shown, len(places))):
        print(place)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a file has more hits than it is allowed")
    parser.add_argument("--lower", action="store_true", help="write down the counts that have fallen")
    parser.add_argument("--show", type=int, default=0, help="hits to print, drawn at random")
    parser.add_argument("paths", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.lower:
        lower()
    for path in arguments.paths:
        report(path, arguments.show)
    if arguments.check:
        sys.exit(check())


if __name__ == "__main__":
    main()
