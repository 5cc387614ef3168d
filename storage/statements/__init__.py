"""Execution of a user's SQL statement: the check that it only reads, its limits, and its rows in batches."""
