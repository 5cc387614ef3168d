"""A step's responses as tensors: the batch, its minibatches, how passes are packed, their loss, and the table of
its tokens.

Plain arrays and tensors, no model. Imports objectives, advantages, rewards' scores, `types` and processes; learner,
rollouts, recording, replay and the loop import it.
"""
