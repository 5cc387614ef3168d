"""Module that `multiprocessing`'s fork server imports before it forks; `pipelines.processes.forking` names it."""

from pipelines.processes.fork_server import IMPORTS, prepare

prepare(IMPORTS)
