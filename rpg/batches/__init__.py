"""A step's responses as tensors: the batch, its minibatches, how passes are packed, and the table of its tokens.

Plain arrays and tensors, no model. Imports rewards' scores, `types` and `processes`; learner, samplers and rollouts
import it.
"""
