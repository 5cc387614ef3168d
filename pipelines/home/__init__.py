"""The home, where everything lives: its directories, and the runs, versions and results in them.

`home` has the paths and the locks, `state` the state of a run, `starting` what no run is recorded of yet, `runs` finds
runs, `versions` has an experiment's versions, `results` the stages' published results, `unrecorded` the rows that the
index lacks, `examined` the nodes with checked GPUs; `garbage` and `removal` delete. Imports `specs` and the store;
everything in this package may import it.
"""
