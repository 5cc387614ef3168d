"""Imports DeepSpeed without MLflow: `from rpg.learner.deepspeed_imported import deepspeed`.

DeepSpeed's autotuner, which nothing here uses, imports MLflow if it is installed. That takes a fifth of the startup
time of a stage's process.
"""

import sys

_MLFLOW = "mlflow"
_HIDDEN = _MLFLOW not in sys.modules

if _HIDDEN:
    sys.modules[_MLFLOW] = None  # type: ignore[assignment]  # an import of it fails as where it is not installed
try:
    import deepspeed as deepspeed
finally:
    if _HIDDEN:
        del sys.modules[_MLFLOW]
