"""The write path: observers, the windows of their steps, chunks, and items on an insert stream."""
