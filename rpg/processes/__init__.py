"""This process among the ranks of a launch: how they meet and speak, their devices, requests to stop.

Imports the ground floor (`specs.machine`), `messages` and the schema of execution.
"""
