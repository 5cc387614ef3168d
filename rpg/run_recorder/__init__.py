"""The record of a run in training: rows, checkpoints and exported weights, in an order in which a crash leaves no gap
and no double.

Rows of a step are on disk, those of all ranks, before a checkpoint of that step gets its name, so a run that goes on
from a checkpoint has every row up to it; rows after it belong to an attempt that the new one supersedes. Responses and
tokens are written by the rank that holds them. A kill between two ranks leaves no half step: what one rank wrote counts
once all have written.
"""
