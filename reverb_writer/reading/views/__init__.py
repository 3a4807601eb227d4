"""Datasets as the frameworks have them; each module imports its framework when it is called for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from reverb_writer.lazy import needs

if TYPE_CHECKING:
    from typing_extensions import Self

    from reverb_writer.slices.batch import Batch


class Views:
    """An iterator over batches, and what it is for PyTorch, JAX and TensorFlow."""

    _num_open_sizes = 2  # leading dimensions of leaves that may differ from batch to batch: B and T

    def transitions(self, n: int = 1, gamma: float = 0.99) -> Any:
        """Return this dataset as an iterator over transitions over n steps, `NStepTransitions` with leaves [B, ...].

        From each window comes its first transition, so `sequence_length` is n + 1; from slices one from each row, with
        a mask. The target of values is `reward + gamma * discount * value(next_observation)`, whatever n is.

        Args:
            n: maximum of steps, >= 1; fewer at the end of an episode.
            gamma: the agent's discount, in [0, 1]; with n = 1 it is not used.

        Raises:
            SpecError: a number out of range.

        Example:
            for transitions in dataset.transitions(n=3, gamma=0.99):
                errors = train(transitions, transitions.batch.info.importance_weights(0.6))
                dataset.update_priorities(transitions.batch, errors)
        """
        from reverb_writer.reading.views.transitions import TransitionsView  # noqa: PLC0415  # imports this module

        return TransitionsView(self, n, gamma)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of batches of tensors; see `views.torch`.

        Args:
            device: device of the tensors; None for the CPU. For a CUDA device memory is pinned.

        With `DataLoader(dataset.as_torch(), batch_size=None, num_workers=N, multiprocessing_context="spawn")` each
        worker process opens a dataset like this one, with a client of the same servers, certificates and token. This
        dataset should be closed then: it fetches as well.
        """
        from reverb_writer.reading.views.torch import replay_view  # noqa: PLC0415  # brings PyTorch

        return replay_view(self, device)

    def as_jax(self, device: Any = None) -> Iterator[Batch]:
        """Return an iterator over batches of JAX arrays on `device`; None for JAX's default. Strings stay NumPy arrays.

        JAX makes 64-bit numbers 32-bit ones unless `jax_enable_x64` is set.
        """
        with needs("`as_jax`", "reverb-writer[jax]"):
            import jax  # noqa: PLC0415

        def put(array: Any) -> Any:
            return array if array.dtype.kind == "O" else jax.device_put(array, device)

        def batches() -> Iterator[Batch]:
            for batch in iter(self):  # type: ignore[call-overload]  # every one of these is an iterator
                yield batch.map_arrays(put)

        return batches()

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: data, and a dict of info and markers; waits for the first batch.

        With `with_next` it has triples, `batch.next` as the third.
        """
        from reverb_writer.reading.views.tf import tf_dataset  # noqa: PLC0415  # brings TensorFlow

        return tf_dataset(self, self._num_open_sizes)

    def close(self) -> None:
        """Stop to fetch, and close what was opened for it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
