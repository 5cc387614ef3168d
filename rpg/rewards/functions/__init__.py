"""Our rewards. Each module is one, named as in a spec, and holds its options and its scoring.

Checking a spec imports them, so a module that is slow to import is imported in `score`.
"""
