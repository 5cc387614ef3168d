"""The home, where everything lives: its directories, and what of runs, versions and results lies in them.

`home` has the paths and the locks, `state` how a run stands, `runs` finds one, `versions` those of an experiment,
`results` the stages' published results, `unrecorded` what the index lacks; `garbage` and `removal` delete. Imports the
ground floor and the store; everything of this package may import it.
"""
