"""Batches of scored responses, one per training step, sampled in step with training or ahead of it.

The responses come from `rollouters`; here they are shared between ranks, and groups that dynamic sampling drops are
replaced. The package imports rollouters, samplers, rewards, data, batches, checkpoints' pieces and `parts`; the keeper,
the trainer and `train` import it.
"""
