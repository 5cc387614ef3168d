"""Problems: read from their sources, given a prompt, freed of copies, published and loaded."""

from rpg.data.loading import encode_prompts, load_problems

__all__ = ["encode_prompts", "load_problems"]
