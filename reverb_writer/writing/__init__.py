"""The write path: observers, windows of steps, chunks, and items on an insert stream."""
