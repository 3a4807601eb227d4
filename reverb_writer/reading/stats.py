"""What can be seen of a dataset from outside."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DatasetStats", "FetchStats"]


@dataclass
class FetchStats:
    """What was fetched so far; cumulative but for the first three.

    Attributes:
        in_flight_samples: asked for and not come.
        ready_samples: come and not taken.
        cache_bytes: what decoded chunks occupy.
        received_samples: samples that came.
        received_bytes: bytes of their messages.
        decoded_chunks: chunks that had to be decoded; all others were known.
        skipped_samples: samples left out under `skip_unsafe`.
        unasked_samples: samples that a server sent although nobody had asked for them, and that were left out.
        lost_samples: at most so many were taken from the server and lost with a connection, or a message that could not
            be read.
        reconnects: connections made again after a loss.
        server_restarts: of them, those that found a server started anew.
    """

    in_flight_samples: int = 0
    ready_samples: int = 0
    cache_bytes: int = 0
    received_samples: int = 0
    received_bytes: int = 0
    decoded_chunks: int = 0
    skipped_samples: int = 0
    unasked_samples: int = 0
    lost_samples: int = 0
    reconnects: int = 0
    server_restarts: int = 0


@dataclass
class DatasetStats(FetchStats):
    """What a dataset has done so far: the sums of `FetchStats` over its servers, and more.

    Attributes:
        batches: batches handed out.
        samples: samples in them.
        wait_s: seconds that the learner has waited for batches.
        last_age_s: how long before it was handed out the first sample of the last batch had come, seconds.
        undelivered_samples: samples come, but not handed out when the dataset was closed; with pieces or slices of
            samples, those of which one is left.
        priority_updates: priorities sent to the server.
        failed_priority_updates: priorities that could not be delivered.
    """

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    last_age_s: float = 0.0
    undelivered_samples: int = 0
    priority_updates: int = 0
    failed_priority_updates: int = 0
