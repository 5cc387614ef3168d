"""The built-in users that speak with the policy. Each module has one user, named as in a spec.

Checking a spec imports it, so it imports no torch.
"""
