"""Imports what commands, their API and their stages do; see tests/pipelines/forked_command.py."""

import importlib
import os
import tempfile

_OURS = (
    "pipelines.jobs.execute",
    "pipelines.prefect.flows.parallel",
    "pipelines.prefect.server.api_process",
    "reasoning_gym",
    "specs.loader",
)
"""None imports DuckDB, which has a thread that no fork would have."""

with tempfile.TemporaryDirectory() as _home:
    _there = {"PREFECT_HOME": _home, "PREFECT_PROFILES_PATH": f"{_home}/profiles.toml"}
    os.environ |= _there
    import prefect.main  # noqa: F401
    import prefect.server.api.server  # noqa: F401

    # One by one: setproctitle finds the place of a title by the first variable, which must keep its place.
    for _name in _there:
        del os.environ[_name]
tempfile.tempdir = None
for _name in _OURS:
    importlib.import_module(_name)
