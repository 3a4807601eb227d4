"""Counters of a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.scalars import Scalars

_GAUGES = {"cache_bytes", "in_flight_samples", "last_age_s", "left_out_servers", "ready_samples"}


@dataclass
class DatasetStats(Scalars):
    """Counters of a dataset since it was opened, of all its servers together.

    The first three, `left_out_servers` and `last_age_s` are present values.

    Attributes:
        in_flight_samples: samples that were requested and have not arrived.
        ready_samples: samples that have arrived and were not returned yet.
        cache_bytes: size of the decoded chunks in the cache, bytes.
        received_samples: samples that have arrived.
        received_bytes: size of their messages, bytes.
        decoded_chunks: chunks that were decoded because the cache did not have them.
        skipped_samples: unsafe or damaged samples, and messages that cannot be read, which `skip_unsafe` left out.
        foreign_items: samples that were left out because their item has another spec than the dataset's first item; the
            log names both specs once.
        unasked_samples: samples that a server sent without a request; they are left out.
        dropped_samples: unread samples that a dataset of several servers dropped, because newer samples show how many
            items a server holds, because the connection was lost, or because the server has left the target.
        forgiven_samples: samples that other servers gave in place of a server that was left out or has left the target.
        left_out_servers: servers whose items are left out now: no connection, no answer, or a rate limiter that has
            blocked samples for a second.
        lost_samples: samples that were in flight when a connection was lost or a message could not be read. The server
            may have sampled all of these samples, or none.
        reconnects: lost connections that were made again.
        server_restarts: reconnections to a server that was restarted.
        batches: batches that `next` and `take` returned.
        samples: samples in these batches.
        wait_s: seconds that the learner has waited for batches.
        last_age_s: seconds between the arrival of the first sample of the last batch and the return of that batch.
        priority_updates: priorities sent to the item's server, or to all servers if the item's server is unknown.
        failed_priority_updates: priorities that the item's server did not take.
        gone_priority_updates: priorities that were not sent because the item's server, or every server, is gone.
    """

    in_flight_samples: int = 0
    ready_samples: int = 0
    cache_bytes: int = 0
    received_samples: int = 0
    received_bytes: int = 0
    decoded_chunks: int = 0
    skipped_samples: int = 0
    foreign_items: int = 0
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
    priority_updates: int = 0
    failed_priority_updates: int = 0
    gone_priority_updates: int = 0

    def metrics(self, **labels: str) -> str:
        """Return the counters in Prometheus's text format, one metric `reverb_writer_dataset_*` each.

        Args:
            **labels: of every metric, such as `table="replay"`.

        >>> print(DatasetStats(gone_priority_updates=2).metrics(table="replay").splitlines()[-1])
        reverb_writer_dataset_gone_priority_updates_total{table="replay"} 2
        """
        escaped = {
            name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in labels.items()
        }
        joined = ",".join(f'{name}="{text}"' for name, text in escaped.items())
        of_all = f"{{{joined}}}" if joined else ""
        lines = []
        for name, value in vars(self).items():
            kind, suffix = ("gauge", "") if name in _GAUGES else ("counter", "_total")
            metric = f"reverb_writer_dataset_{name}{suffix}"
            lines += [f"# TYPE {metric} {kind}", f"{metric}{of_all} {value:g}"]
        return "\n".join(lines) + "\n"
