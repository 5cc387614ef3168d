"""Our tools: each module holds one, is called what a spec calls it, and says what options it takes.

Checking a spec imports it, so it imports no torch.
"""
