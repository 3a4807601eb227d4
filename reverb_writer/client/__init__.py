"""The verbs of a replay client, over one server or several: insert, sample, priorities, specs, variables."""
