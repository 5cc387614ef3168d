"""The machine below every package: files, locks, processes and their ends.

It has atomic files with their digests and manifests; the user's own cache directory; ownership of runs (leases, fences,
liveness) and of GPUs; a process's parent, launch, log and cause of exit. It is the ground floor: it imports the
standard library, psutil and those modules of `specs` that need no more (errors, bounds, documents, secrets). `rpg` and
`storage`, which never import each other, share it.
"""
