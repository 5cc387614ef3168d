"""`rpg replay`: a run's recorded rollouts under the objective that it was trained with and under others.

`objectives` lists the other objectives, `rows` reads recorded steps, `weights` finds those of checkpoints, `run`
evaluates steps under every objective, `gradients` differentiates by the parameters, `page` draws the results. The
mathematics is in rpg/replay.
"""
