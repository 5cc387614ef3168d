"""Our tools. Each module holds one, named as in a spec, and its options.

Checking a spec imports it, so it imports no torch.
"""
