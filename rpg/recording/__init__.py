"""Writes a run's files: its directory, the rows of each step as Parquet segments, and its progress.

Imports `types`, batches and specs. The store reads these files without importing this package.
"""
