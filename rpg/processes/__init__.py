"""This process among the ranks of a launch: rendezvous, communication, devices, and requests to stop.

Imports the ground floor (`specs.machine`), `messages` and the schema of execution.
"""
