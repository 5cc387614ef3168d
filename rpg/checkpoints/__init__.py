"""Stores the whole state of a run on disk: directories with a manifest, tensors in pieces, and a retention rule.

Any number of ranks can read a checkpoint that another number wrote. Imports the ground floor and `processes`; parts
with state pass it on as pieces and values.
"""
