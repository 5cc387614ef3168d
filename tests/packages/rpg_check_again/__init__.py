"""A user's own package, which knows of rpg what docs/extending.md says."""
