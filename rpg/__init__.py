"""How it is trained: regularized policy gradients and their rivals, from a resolved spec to weights and rows.

`train` is the trainer process, `trainer` its loop; the rooms below hold what the loop is made of. Imports specs, torch,
DeepSpeed, vLLM and transformers; never Prefect, DuckDB, Optuna or the packages above.
"""
