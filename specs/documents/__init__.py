"""The JSON documents of a record: their shapes, and how they are read."""
