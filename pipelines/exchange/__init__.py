"""Runs that leave their home: a model with its card for a Hub, an export that others read, and its import elsewhere.

The recipient gets its description too: question, answer with intervals, lineage, certificate and the spec that made it.
"""
