"""The sampler in the trainer's own process, over the learner's own weights: continuous batching without padding."""
