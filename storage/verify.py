"""What is wrong with the database or with the segments it is made from."""

from pathlib import Path


def check(home_root: Path) -> list[str]:
    """One line per problem; [] if all is well."""
    raise NotImplementedError
