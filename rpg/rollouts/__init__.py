"""From prompts to scored responses: what the loop asks for a step's batch.

Sampling in step with training or ahead of it, scoring, and the groups that dynamic sampling throws away. Imports
samplers, rewards, data and batches; only the trainer and what stands above it import this room.
"""
