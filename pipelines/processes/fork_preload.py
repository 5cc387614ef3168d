"""Module that `multiprocessing`'s fork server imports before it forks; `pipelines.processes.forking` refers to it."""

from pipelines.processes.fork_server import IMPORTS, prepare

prepare(IMPORTS)
