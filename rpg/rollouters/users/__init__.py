"""Our users that speak with the policy: each module holds one, and is called what a spec calls it.

Checking a spec imports it, so it imports no torch.
"""
