"""Measures a checkpoint: samples on the evaluation sets, turns scores into mean@k, pass@k and maj@k, writes their rows.

A stage that runs in its own process. Imports rollouters, samplers, rewards, data and recording.
"""
