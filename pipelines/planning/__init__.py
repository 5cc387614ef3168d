"""Planning: from a spec to the work that it takes. Runs and stages with their fingerprints, memory, tokens and GPU
hours.

Reads and computes; writes nothing but notes of digests. Imports specs and the home; all packages that execute work
import it.
"""
