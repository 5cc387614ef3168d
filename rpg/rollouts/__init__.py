"""A step's batch of scored responses, as the loop asks for it: made in step with training or ahead of it.

The responses come from `rollouters`; here they are shared between ranks, and groups that dynamic sampling throws away
are replaced. Imports rollouters, samplers, rewards, data, batches, checkpoints' pieces and `parts`; the keeper, the
trainer and `train` import it.
"""
