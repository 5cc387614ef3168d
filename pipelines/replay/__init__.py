"""`rpg replay`: a run's recorded rollouts under the objective that it was trained with and under others.

`objectives` says which others, `rows` reads recorded steps, `run` takes them through every objective, `gradients`
differentiates by the parameters of checkpoints, `page` draws it. The mathematics is in rpg/replay.
"""
