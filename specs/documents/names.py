"""Rules for names of runs and files. They are stricter for new names than for names in an existing record."""

import re

PORTABLE = "[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,254}"
"""Pattern of names that are valid file names in any home."""
_GLOB_SIGNS = frozenset("*?[]")


def is_portable_name(text: str) -> bool:
    """Returns whether a text can be the name of a file or a run in any home: no separator, no glob sign, no leading
    dot."""
    return bool(re.fullmatch(PORTABLE, text))


def is_readable_name(text: str) -> bool:
    """Returns whether an entry of a directory can be read by its name: it is text, has no leading dot and no glob
    sign."""
    return text.isprintable() and not text.startswith(".") and not _GLOB_SIGNS.intersection(text)
