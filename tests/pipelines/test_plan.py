"""Plan: what makes a result what it is, what is done, and why something runs."""
