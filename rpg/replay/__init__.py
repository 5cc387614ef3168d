"""Replays recorded rollouts under another objective: computes the losses and gradient weights that the objective would
have had.

`step` recomputes one step's loss, `tally` sums it up, and `comparison` compares two objectives; they need no model,
only advantages, batches, objectives and `metrics`. `kept` loads a checkpoint's policy and reference, and sums
divergences over tokens with them; `gradient` differentiates the same loss by the parameters. Nothing here
samples, and the training loop does not import it.
"""
