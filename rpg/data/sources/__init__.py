"""Built-in data sources, one per module under its name in the spec: its options and how to read it.

Checking a spec imports them, so slow imports belong in `read`.
"""
