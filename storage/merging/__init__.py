"""Merging of Parquet files: a run's segments into one file for each table, and the small files of many runs into
packs."""
