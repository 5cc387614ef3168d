"""The time of a training step on GPUs by arithmetic: its parts, the changes that save most, and the split of the GPUs
between training and sampling."""
