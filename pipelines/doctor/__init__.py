"""`rpg doctor`: reports what is installed, reachable and misconfigured, and tests GPUs with real work.

`installation` examines this machine and the services that a spec's launcher reaches, `gpu_checks` trains and samples
for minutes. Imports running, the launchers and services; the command line imports it.
"""
