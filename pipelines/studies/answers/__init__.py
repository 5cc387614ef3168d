"""Answers of a study: its record read, which trial is best and on which ground, its page, its best spec, its artifact.

Everything here is made from study.json and from what its runs recorded; nothing looks into Optuna's storage.
"""
