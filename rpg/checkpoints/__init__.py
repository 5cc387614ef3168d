"""The whole state of a run on disk: directories with a manifest, tensors in pieces, and which ones are kept.

Any number of ranks reads what another number wrote. Imports the ground floor and `processes`; the parts that have
state hand it over as pieces and values.
"""
