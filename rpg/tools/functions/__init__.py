"""The built-in tools. Each module has one tool, named as in a spec, and its options.

Checking a spec imports it, so it imports no torch.
"""
