"""The record in a browser, and for mirrors: a table of everything, the report pages, and the record's files, read-only.

`rpg report --serve` and `rpg up --profile server` start it; on its own, `python -m pipelines.web`. It writes nothing to
the home.
"""
