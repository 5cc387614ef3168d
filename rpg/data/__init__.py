"""Problems: read from their sources, given a prompt, freed of copies, published and loaded.

`sources` holds ours, one a module; `staging` is the data stage, `loading` what the later stages read of it. A user's
own source is written as ours are, see docs/extending.md.
"""

from rpg.data.problems import Message, SourceProblem
from specs.schema.data import Source

__all__ = ["Message", "Source", "SourceProblem"]
