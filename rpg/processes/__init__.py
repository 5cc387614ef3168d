"""This process among others: ranks, parents, requests to stop, GPU slots of a machine, devices, exit causes.

Low in the house: imports `files`, the schema and its errors alone. Light: no torch before it is needed, so that
launchers may use it.
"""
