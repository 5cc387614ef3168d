"""The spec classes: one frozen Pydantic model for each section of a spec file, with documentation under each field.

Imports the errors, the metrics and `extensions`; every other package may import it.
"""
