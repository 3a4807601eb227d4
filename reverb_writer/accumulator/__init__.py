"""Data of several rates collected into one item: `TrajectoryAccumulator` and its timescales."""
