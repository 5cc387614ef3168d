"""`rpg doctor`: what is installed, what answers and what is misconfigured, and real work on GPUs.

`installation` examines this machine and what a spec's launcher reaches, `gpu_checks` trains and samples for minutes.
Imports running, the launchers and services; the command line imports it.
"""
