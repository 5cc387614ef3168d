"""The verbs of the command line: a module each, found by its name.

NAME.py holds the function NAME that is the verb, or a `group` of further verbs. A new verb is a new module here and its
name in PANELS, the groups of `rpg --help`. What several verbs share stands in the folder above; what is heavy is
imported inside the verb.
"""

PANELS = {
    "Begin": ("init", "validate", "schema", "plan", "certify", "doctor", "judge"),
    "Run": ("run", "evaluate", "submit", "watch", "logs", "cancel", "resume"),
    "Look": ("runs", "show", "compare", "report", "sql", "replay"),
    "Studies": ("study",),
    "Server": ("up", "down", "worker", "schedules"),
    "Keep": ("export", "import_", "push", "sync", "rm", "gc", "db"),
}
"""Group -> modules of its verbs, in the order in which they are needed."""
