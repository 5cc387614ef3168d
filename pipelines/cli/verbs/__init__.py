"""The verbs of the command line: a module each, found by its name.

NAME.py holds the function NAME that is the verb, or a `group` of further verbs. A new verb is a new module here. What
several verbs share stands in the folder above; what is heavy is imported inside the verb.
"""
