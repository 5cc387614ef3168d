"""The verbs of the command line: one module for each, found by its name.

NAME.py holds the function NAME that is the verb, or a `group` of further verbs. To add a verb, add a module here and
its name in PANELS, the groups of `rpg --help`. Shared code is in the folder above; slow imports are inside the verb.
"""

PANELS = {
    "Begin": ("init", "validate", "schema", "plan", "certify", "doctor", "judge"),
    "Run": ("run", "evaluate", "submit", "watch", "logs", "cancel", "resume"),
    "Look": ("runs", "show", "compare", "report", "sql", "replay"),
    "Studies": ("study",),
    "Server": ("up", "down", "worker", "schedules"),
    "Keep": ("export", "import_", "push", "sync", "rm", "gc", "db"),
}
"""Group -> modules of its verbs, in the usual order of use."""
