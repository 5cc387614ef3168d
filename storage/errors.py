"""What a query can get wrong."""

from specs.errors import RpgError


class QueryError(RpgError):
    """The SQL that the user gave cannot run. `str()` is the whole message, shown as it stands."""
