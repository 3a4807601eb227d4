"""The public classes: what `replay` names is one server or several; writers and readers of it."""
