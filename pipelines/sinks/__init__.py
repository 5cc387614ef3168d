"""Sinks: what a run records, sent to the trackers that its spec names under `sinks`.

The record is the truth, and a tracker a copy of it. A process beside the run, one for each sink, reads the record's
rows and sends what is new; training knows nothing of it, and a sink that fails costs nobody else anything. `rpg sync`
sends later what was missed.
"""
