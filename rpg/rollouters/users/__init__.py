"""Our users that speak with the policy. Each module holds one, named as in a spec.

Checking a spec imports it, so it imports no torch.
"""
