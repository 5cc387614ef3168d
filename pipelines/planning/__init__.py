"""From a spec to what will be done: runs and stages with their fingerprints, memory, tokens and GPU hours.

Reads and computes; writes nothing but notes of digests. Imports specs and the home; everything that acts
imports it.
"""
