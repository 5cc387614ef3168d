"""Gradient of every objective, by enumeration of all responses of small policies: `rpg certify`.

Imports objectives and the schema alone; the keeper stores a run's certificate with it.
"""
