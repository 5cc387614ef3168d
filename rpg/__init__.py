"""How it is trained: regularized policy gradients and their rivals, from a resolved spec to weights and rows.

`train` is the trainer process, `trainer` its loop; the rooms below hold what the loop is made of. Imports specs, torch,
DeepSpeed, vLLM and transformers; never Prefect, DuckDB, Optuna or the packages above.
"""

import os

# Read by transformers when it is imported: what is computed faster by a kernel is not fetched from a Hub and run.
os.environ["USE_HUB_KERNELS"] = "0"
