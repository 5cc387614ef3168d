"""Sinks: the record of a run, sent to the trackers that its spec names under `sinks`.

The record is authoritative, and a tracker has a copy of it. For each sink, a process beside the run reads the record's
rows and sends new ones; training does not depend on it, and a failing sink affects nothing else. `rpg sync` sends
missing rows later.
"""
