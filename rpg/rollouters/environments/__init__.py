"""The built-in environments. Each module has one environment, named as in a spec, and its options.

Checking a spec imports it, so it imports no torch. Modules that are slow to import are imported in `generate`.
"""
