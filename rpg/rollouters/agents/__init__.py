"""Our programs of agents. Each module holds one, named as in a spec, and its options."""
