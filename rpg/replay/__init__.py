"""Recorded rollouts under another objective: what its losses and gradient weights would have been.

`step` takes one step's loss again, `tally` sums it up, `comparison` sets two objectives side by side: without a model,
on advantages, batches, objectives and `metrics`. `gradient` differentiates the same loss by the parameters of a
checkpoint, with the learner's logprobs. Nothing samples, and nothing of the training loop imports it.
"""
