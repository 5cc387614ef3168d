"""One statement of SQL that somebody wrote: whether it only reads, what it may cost, and its rows as they come."""
