"""A step's responses as tensors: the batch, its minibatches, the packing and loss of passes, and the token table.

Plain arrays and tensors, no model. Imports objectives, advantages, rewards' scores, `types` and processes; learner,
rollouts, recording, replay and the loop import it.
"""
