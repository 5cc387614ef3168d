"""Our data sources: each module is one, called what a spec calls it, with the options it takes and how it is read.

Checking a spec imports them: what takes long to import is imported in `read`.
"""
