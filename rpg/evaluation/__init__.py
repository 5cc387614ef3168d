"""Measures a checkpoint: samples on the evaluation sets, computes mean@k, pass@k and maj@k, and writes the rows.

A stage that runs in its own process. Imports rollouters, samplers, rewards, data and recording.
"""
