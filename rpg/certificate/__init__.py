"""Certifies the gradient of every objective by enumerating all responses of small policies: `rpg certify`.

Imports only objectives and the schema. The run recorder stores a run's certificate with the run.
"""
