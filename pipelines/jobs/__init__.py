"""One core under the command line and the Python API: a spec to a plan, a run here, a submission.

Functions return objects and text; `pipelines.cli` parses and prints them, `pipelines.api` hands them over.
"""
