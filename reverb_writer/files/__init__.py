"""Trajectories on disk: a format of NumPy's own files, a writer, readers, and the ways to a replay server and back."""
