"""The connection of this process to Ray."""

from __future__ import annotations

from reverb_writer.lazy import needs


def connect_ray(address: str | None = None) -> None:
    """Connect to Ray if this process is not connected yet.

    Args:
        address: of Ray's head, "auto" for the cluster of this machine; None for what RAY_ADDRESS says, the cluster of
            this machine or, if there is none, one that ends with this process.

    Raises:
        MissingExtraError: Ray is not installed.
        ConnectionError: nothing answers there.
    """
    with needs("reverb_writer.ray", "reverb-writer[ray]"):
        import ray  # noqa: PLC0415  # of the extra
    if not ray.is_initialized():
        ray.init(address)
