"""A connection that was lost, and what the user can do about it."""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.errors import ReplayTimeoutError
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.grpc_errors import is_listening, is_refusal, is_silence


@dataclass(frozen=True)
class ConnectionLoss:
    """A connection was lost, and there is no new one yet."""

    channel: Channel
    error: Exception  # what ended the last connection, or what the last attempt to make one met
    reason: str  # the same in words

    @property
    def is_silent(self) -> bool:
        """Whether the server is there and does not answer, by all attempts to connect in the last seconds."""
        seen = self._seen
        is_late = isinstance(self.error, ReplayTimeoutError) or is_silence(seen)
        return is_late or (is_refusal(seen) and is_listening(self.channel.address))

    def explain(self, silence_s: float) -> str:
        """Say what was seen. Only a refused connection advises a start: a paused server would lose its tables by it."""
        address, heard = self.channel.address, f"last heard of {silence_s:.1f} s ago ({self._seen})"
        if self.is_silent:
            return f"The server at {address} does not answer, {heard}. It may be paused: look at its process."
        if is_refusal(self._seen):
            return f"The server at {address} is gone, {heard}. Start it again."
        return f"There is no connection to the server at {address}, {heard}. It is tried again and again."

    @property
    def _seen(self) -> str:
        return "; ".join([self.reason.rstrip("."), *self.channel.recent_connect_errors()])
