"""The spec classes: what a spec file may say, one frozen Pydantic model a section, each field documented under itself.

Imports the errors alone; every other room of the house may import it.
"""
