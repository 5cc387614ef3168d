"""What a run leaves for readers: its directory, the rows of each step as Parquet segments, and its progress.

The only room of rpg that writes for readers. Imports `files`, batches and specs/records.py; the store reads what it
writes and imports none of it.
"""
