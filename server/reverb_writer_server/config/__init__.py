"""The configuration of a server: schema, sources, checks."""
