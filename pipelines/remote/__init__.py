"""The record of a home read from another machine: which files belong to it, and how they get there.

Knows the layout under RPG_HOME and nothing of what the documents say.
"""
