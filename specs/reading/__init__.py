"""The steps from a spec file to a tree of nodes, and from the tree to a Pydantic model.

They parse YAML with the place of every key, merge the extended files and `--set`, and turn Pydantic's errors into plain
messages at those places. Imports the schema, `extensions` and the errors.
"""
