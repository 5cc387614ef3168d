"""Recorded rollouts under another objective: what its loss and gradient weights would have been, without sampling.

Imports objectives, batches and the learner; nothing of the loop imports it.
"""
