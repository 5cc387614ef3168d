"""Reads problems from their sources, gives them prompts, removes copies, publishes and loads them.

`sources` holds the built-in sources, one per module; `staging` is the data stage; `loading` reads its result for later
stages. A user's own source is written like the built-in ones, see docs/extending.md.
"""

from rpg.data.problems import Message, SourceProblem
from specs.schema.data import Source

__all__ = ["Message", "Source", "SourceProblem"]
