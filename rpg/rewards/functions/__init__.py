"""Our rewards: each module is one, called what a spec calls it, with the options it takes and how it scores.

Checking a spec imports them: what takes long to import is imported in `score`.
"""
