"""A dm-reverb server in a process of its own, for tests: `python serve.py`.

In: the pickled fields of its tables and the path of its checkpoints, on stdin. Out: the port, as a line on stdout. It
serves until stdin is closed, so it never outlives whoever started it.

A process of its own matters: within one process dm-reverb's client reads the tables in memory and sends nothing.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Table:
    """What a test says of a table; by default a queue that gives every item once and in the order of insertion.

    Attributes:
        selector: Class in `reverb.selectors` that picks the items to sample; `Prioritized` gets the exponent 1.
        max_times_sampled: 1 removes an item when it is read, 0 keeps it.
        signature: Nest of `tf.TensorSpec`, or None.
    """

    name: str
    selector: str = "Fifo"
    max_times_sampled: int = 1
    signature: Any = None


@contextmanager
def serving(tables: Sequence[Table], *, checkpoints: Path | None = None) -> Iterator[str]:
    """Start a server with `tables`, give its address, and stop it."""
    with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(([vars(table) for table in tables], checkpoints), process.stdin)
            process.stdin.flush()
            yield f"localhost:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def serving_locally(tables: Sequence[Table]) -> Iterator[str]:
    """Start our own server, in threads of this process, with `tables`, give its address, and stop it."""
    import tree

    import reverb_writer as rw
    from reverb_writer.protocol.signatures import ArraySpec

    def spec(leaf: Any) -> ArraySpec:
        shape = None if leaf.shape.rank is None else tuple(leaf.shape.as_list())
        return ArraySpec(shape, leaf.dtype.as_numpy_dtype, leaf.name or "")

    selectors = {
        "Fifo": "fifo",
        "Lifo": "lifo",
        "Uniform": "uniform",
        "MaxHeap": "max_heap",
        "MinHeap": "min_heap",
        "Prioritized": rw.Prioritized(1.0),
    }
    configs = [
        rw.TableConfig(
            table.name,
            sampler=selectors[table.selector],  # type: ignore[arg-type]  # a name is no literal here
            max_times_sampled=table.max_times_sampled,
            signature=None if table.signature is None else tree.map_structure(spec, table.signature),
        )
        for table in tables
    ]
    with rw.LocalServer(configs) as server:
        yield server.address


def _main() -> None:
    import reverb

    def selector(name: str) -> Any:
        return getattr(reverb.selectors, name)(*([1.0] if name == "Prioritized" else []))

    fields, checkpoints = pickle.load(sys.stdin.buffer)  # noqa: S301  # from `serving`, in our parent
    tables = [Table(**row) for row in fields]
    server = reverb.Server(
        [
            reverb.Table(
                table.name,
                sampler=selector(table.selector),
                remover=reverb.selectors.Fifo(),
                max_size=1_000_000,
                rate_limiter=reverb.rate_limiters.MinSize(1),
                max_times_sampled=table.max_times_sampled,
                signature=table.signature,
            )
            for table in tables
        ],
        checkpointer=None if checkpoints is None else reverb.checkpointers.DefaultCheckpointer(str(checkpoints)),
    )
    print(server.port, flush=True)
    sys.stdin.buffer.read()
    server.stop()


if __name__ == "__main__":
    _main()
