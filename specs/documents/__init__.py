"""The documents of a record: the shape of each, and the one way to read them."""
