"""Scorers that are models: a judge behind an address or in a process of its own, a classifier in a process of its own.

`prompts` is what a judge is asked, `endpoint` and `model_process` who answers, `verdicts` what was said and where it is
kept, `budget` what may be spent, `scorer` makes scores of it.
"""
