"""A reward and a data source of a user's own."""
