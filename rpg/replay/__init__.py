"""Replays recorded rollouts under another objective: computes the losses and gradient weights that the objective would
have had.

`step` recomputes one step's loss, `tally` sums it up, and `comparison` compares two objectives; they need no model,
only advantages, batches, objectives and `metrics`. `gradient` differentiates the same loss by the parameters of a
checkpoint, with the learner's logprobs. Nothing here samples, and the training loop does not import it.
"""
