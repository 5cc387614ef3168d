"""Ranks on machines that a process here holds a connection to: what `ssh` and `ray` share.

`head` runs where `rpg run` does and holds a `connection` to each machine; `node` runs there and starts the ranks.
"""
