"""The rate limiter's time-out that Reverb's own datasets send, which our client never does."""

from __future__ import annotations

from typing import Any

import numpy as np
import reverb
import tensorflow as tf


def test_a_dataset_ends_when_its_rate_limiter_timeout_is_over(address: str, peer: Any) -> None:
    peer.insert([np.arange(3, dtype=np.int64)], {"ours": 1.0})
    dataset = reverb.TrajectoryDataset(
        address,
        "ours",
        (tf.int64,),
        (tf.TensorShape([1, 3]),),
        max_in_flight_samples_per_worker=1,
        num_workers_per_iterator=1,
        rate_limiter_timeout_ms=300,
    )
    assert [sample.data[0].numpy().tolist() for sample in dataset] == [[[0, 1, 2]]]
