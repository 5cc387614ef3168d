"""The processes that this one starts: watched, stopped, and ended by the next command when they were orphaned.

Imports the home and its state alone; running and services import it.
"""
