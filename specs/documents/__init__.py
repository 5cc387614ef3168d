"""The documents of a record: their shapes, and the reading of them."""
