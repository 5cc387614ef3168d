"""The spec classes: what a spec file may say, one frozen Pydantic model a section, each field documented under itself.

Imports the errors, the metrics and `extensions`; every other package may import it.
"""
