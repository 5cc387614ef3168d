"""`rpg doctor`: reports installed packages, reachable services and misconfigurations, and tests GPUs with real work.

`installation` examines this machine and the services that a spec's launcher reaches, `gpu_checks` trains and samples
for minutes. Imports running, the launchers and services; the command line imports it.
"""
