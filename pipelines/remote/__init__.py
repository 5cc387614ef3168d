"""The record of a home read from another machine: which files belong to it, and how they are copied.

The code depends on the layout under RPG_HOME, not on the content of the documents.
"""
