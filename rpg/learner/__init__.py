"""The model that is trained: under DeepSpeed, its logprobs, packed passes, adapters, and shards at ZeRO 3.

Imports batches, processes and checkpoints' pieces; it knows nothing of objectives, samplers or the loop.
"""
