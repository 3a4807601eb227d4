"""Collection of data of several rates into one item: `TrajectoryAccumulator`."""
