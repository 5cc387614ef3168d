"""`rpg replay`: a run's recorded rollouts under the objective that it was trained with and under others.

`objectives` lists the other objectives, `rows` reads recorded steps, `run` evaluates them under every objective,
`gradients` differentiates by the parameters of checkpoints, `page` draws the results. The mathematics is in rpg/replay.
"""
