"""Scorers that are models: a judge at an address or in its own process, or a classifier in its own process.

`prompts` writes the questions to a judge. `endpoint` and `model_process` get the answers. `verdicts` reads and keeps
the verdicts. `budget` bounds the spending. `scorer` turns verdicts into scores.
"""
