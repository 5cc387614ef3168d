"""`rpg doctor --gpu`: real work of a few minutes that shows whether a node, or all hosts of a spec, can train.

`catalogue` lists the checks; each is one function of the modules `machine`, `network`, `numerics`, `speed`, `training`
and `engines`, which compute on whatever device they are given. `check` has the types, `models` the random models.
`session` launches a `rank` for every GPU as a run's ranks are launched; the rank starts every check in its own process
(`child`), so that one that hangs or crashes does not affect the others. Above the launchers, below the command line.
"""
