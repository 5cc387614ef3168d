"""Files of a run for its readers: its directory, the rows of each step as Parquet segments, and its progress.

The room that writes for readers. Imports `types`, batches and specs; the store reads what it writes and
imports none of it.
"""
