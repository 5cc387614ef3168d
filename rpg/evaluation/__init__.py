"""Measuring a checkpoint: sampling on the evaluation sets, scores to mean@k, pass@k and maj@k, and their rows.

A stage in a process of its own. Imports rollouters, samplers, rewards, data and recording.
"""
