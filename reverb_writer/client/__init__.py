"""The verbs of a replay client at one server: insert, sample, priorities, specs."""
