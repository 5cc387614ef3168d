"""The shared core of the command line and the Python API: plans for a spec, runs here, submissions.

Functions return objects and text; `pipelines.cli` parses and prints them, `pipelines.api` returns them.
"""
