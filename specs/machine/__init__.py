"""The machine under every package: files, locks, processes and how they end.

Files written whole, their digests and manifests; the user's own cache directory; who holds a run (leases, fences,
liveness) and a GPU; a process's parent, launch, log and cause of exit. The ground floor of the house: it imports the
standard library, psutil and of `specs` what needs no more (errors, bounds, documents, secrets). `rpg` and `storage`,
which never import each other, share it.
"""
