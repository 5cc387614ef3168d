"""Scorers that are models: a judge behind an address or in its own process, a classifier in its own process.

`prompts` writes the questions to a judge. `endpoint` and `model_process` get the answers. `verdicts` reads and keeps
the verdicts. `budget` bounds the spending. `scorer` turns verdicts into scores.
"""
