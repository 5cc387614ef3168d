"""The built-in rewards. Each module is a reward with its name in specs, and has its options and its scoring.

Checking a spec imports them, so a module that is slow to import is imported in `score`.
"""
