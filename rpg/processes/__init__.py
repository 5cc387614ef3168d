"""This process among others: ranks, parents, requests to stop, GPU slots of a machine, devices, exit causes.

The ground floor: imports `files`, `types` and the schema alone. Light: no torch before it is needed, so that launchers
may use it.
"""
