"""DeepSpeed, imported without MLflow: `from rpg.learner.deepspeed_imported import deepspeed`.

DeepSpeed's autotuner, which nothing here uses, imports MLflow wherever it is installed: a fifth of the seconds in which
a stage's process begins.
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
