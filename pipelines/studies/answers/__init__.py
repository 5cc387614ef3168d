"""Answers of a study: its record, its best trial with the reason, its page, its best spec, and its artifact.

Everything is computed from study.json and from its runs' records; nothing reads Optuna's storage.
"""
