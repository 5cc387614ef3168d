"""Runs outside their home: a model with its card on a Hub, an export for others, and the import of an export.

The recipient gets its description too: question, answer with intervals, lineage, certificate and the spec that made it.
"""
