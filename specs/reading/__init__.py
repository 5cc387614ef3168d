"""How a spec file becomes a tree, and a tree a model.

YAML text with the place of every key, what a file extends laid under it, `--set` laid over it, and Pydantic's errors
turned into plain words at those places. Imports the schema, `extensions` and the errors.
"""
