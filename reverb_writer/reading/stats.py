"""Counters of a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.scalars import Scalars


@dataclass
class DatasetStats(Scalars):
    """Counters of a dataset since it was opened, of all its servers together.

    The first three, `left_out_servers`, `last_age_s`, `last_mean_age` and `last_max_age` are present values.

    Attributes:
        in_flight_samples: samples that were requested and have not arrived.
        ready_samples: samples that have arrived and were not returned yet.
        cache_bytes: size of the decoded chunks in the cache, bytes.
        received_samples: samples that have arrived.
        received_bytes: size of their messages, bytes.
        decoded_chunks: chunks that were decoded because the cache did not have them.
        skipped_samples: unsafe or damaged samples, and messages that cannot be read, which `skip_unsafe` left out.
        foreign_items: samples that were left out because they do not fit the table's signature, or because their spec
            differs from the spec of the dataset's first item; the log names both structures once.
        masked_ends: rows of the made batches that end an episode without a final observation: the observer was told
            `end_of_episode` alone, or `truncated` without `final_observation`. Their action is in no transition.
        too_old_samples: samples that were left out because they were older than `max_age`.
        unasked_samples: samples that a server sent without a request; they are left out.
        dropped_samples: unread samples that a dataset of several servers dropped, because newer samples show how many
            items a server holds, because the connection was lost, or because the server has left the target.
        forgiven_samples: samples that other servers gave in place of a server that was left out or has left the target.
        left_out_servers: servers whose items are left out now: no connection, no answer, or a rate limiter that
            blocks samples. Servers that are read in turn are left out after 0.1 s without a batch, servers that are
            drawn by share after a second.
        lost_samples: samples that were in flight when a connection was lost or a message could not be read. The server
            may have sampled all of these samples, or none.
        reconnects: lost connections that were made again.
        server_restarts: reconnections to a server that was restarted.
        batches: batches that `next` and `poll` returned.
        samples: samples in these batches.
        wait_s: seconds that the learner has waited for batches.
        last_age_s: seconds between the arrival of the first sample of the last batch and the return of that batch.
        last_mean_age: mean age of the samples of the last batch when it was returned: the dataset's `version` less the
            version of the sample. 0 if there is none.
        last_max_age: the largest of these ages.
        priority_updates: priorities sent to the item's server, or to all servers if the item's server is unknown.
        failed_priority_updates: priorities that the item's server did not take.
        gone_priority_updates: priorities that were not sent because the item's server, or every server, has left.
    """

    in_flight_samples: int = 0
    ready_samples: int = 0
    cache_bytes: int = 0
    received_samples: int = 0
    received_bytes: int = 0
    decoded_chunks: int = 0
    skipped_samples: int = 0
    foreign_items: int = 0
    masked_ends: int = 0
    too_old_samples: int = 0
    unasked_samples: int = 0
    dropped_samples: int = 0
    forgiven_samples: int = 0
    left_out_servers: int = 0
    lost_samples: int = 0
    reconnects: int = 0
    server_restarts: int = 0
    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    last_age_s: float = 0.0
    last_mean_age: float = 0.0
    last_max_age: int = 0
    priority_updates: int = 0
    failed_priority_updates: int = 0
    gone_priority_updates: int = 0
