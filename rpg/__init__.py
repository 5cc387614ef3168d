"""Trains a policy with regularized policy gradients or a rival objective: resolved spec in, weights and rows out.

`train` is the trainer process and `trainer` its loop; the packages below hold the parts of the loop. This package
imports specs, torch, DeepSpeed, vLLM and transformers, but never Prefect, DuckDB, Optuna or the packages above it.
"""

import os

# transformers reads this when it is imported: it must not download a faster kernel from a Hub and run it.
os.environ["USE_HUB_KERNELS"] = "0"
