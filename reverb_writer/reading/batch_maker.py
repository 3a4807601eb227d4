"""How assembled samples become batches: the interface between a kind of dataset and the thread that fetches."""

from __future__ import annotations

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.slices.batch import Batch


class BatchMaker:
    """Makes batches of assembled samples, in the thread that fetches.

    Attributes:
        is_lazy: whether each batch is made when the reader waits for it, and none ahead.
        num_left_out: samples that were left out because they are too old.
        newest: the newest version, by which samples have an age; None if it is unknown.
    """

    is_lazy = False
    num_left_out = 0
    newest: int | None = None

    def make(self, samples: BatchAssembler, server: str) -> list[Batch]:
        """Return the batches of all assembled samples, none if they fill no batch; `server` is their server's address.

        The caller begins the next batch.
        """
        raise NotImplementedError

    def is_full(self, samples: BatchAssembler) -> bool:  # noqa: ARG002  # for other makers
        """Return whether these samples fill a batch, although there is room for more."""
        return False

    def rest(self) -> Batch | None:
        """Return a last, smaller batch of the remaining rows of earlier samples; None if no rows remain."""
        return None
