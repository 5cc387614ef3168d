"""Calculated time of a training step on GPUs: its parts, the changes that save the most, and the split of the GPUs
between training and sampling."""
