"""From a spec to what will be done: runs and stages with their fingerprints, memory, tokens and GPU hours.

Pure: reads, computes and changes nothing. Imports specs and the state on disk; everything that acts imports it.
"""
