"""The model in training: DeepSpeed, logprobs, packed passes, adapters, and shards at ZeRO 3.

Imports batches, processes and checkpoints' pieces, but nothing of objectives, samplers or the loop.
"""
