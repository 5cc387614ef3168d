"""Recorded rollouts under another objective: what its losses and gradient weights would have been.

`step` takes one step's loss again, `tally` sums it up, `comparison` sets two objectives side by side. No model and no
sampling: everything stands on advantages, batches, objectives and `metrics`, and nothing of the training loop imports
it.
"""
