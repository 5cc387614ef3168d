"""Imports what commands, their API and their stages do; see tests/pipelines/forked_command.py."""

import importlib
import os
import tempfile

from pipelines.running.fork_imports import TRAINING

with tempfile.TemporaryDirectory() as _home:
    _before = dict(os.environ)
    os.environ |= {"PREFECT_HOME": _home, "PREFECT_PROFILES_PATH": f"{_home}/profiles.toml"}
    import prefect.main
    import prefect.server.api.server  # noqa: F401

    os.environ.clear()
    os.environ.update(_before)
_OURS = (
    "pipelines.cli.execute",
    "pipelines.prefect_flows.parallel",
    "pipelines.prefect_server.api_process",
    "rpg.data.staging",
    "rpg.evaluation.stage",
    "specs.loader",
)
for _name in (*_OURS, *TRAINING):
    importlib.import_module(_name)
