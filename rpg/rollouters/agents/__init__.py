"""The built-in programs of agents. Each module has one program, named as in a spec, and its options."""
