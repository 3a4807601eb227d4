"""A connection that was lost, and what the user can do about it."""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.errors import ReplayTimeoutError
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.grpc_errors import is_listening, is_refusal, is_silence


@dataclass(frozen=True)
class ConnectionLoss:
    """A connection was lost, and there is no new one yet."""

    error: Exception  # what ended the last one, or what the last attempt to make one met
    reason: str  # the same in words

    @property
    def is_silence(self) -> bool:
        """Whether the server is there and does not answer."""
        return isinstance(self.error, ReplayTimeoutError) or is_silence(self.reason)

    def is_silent(self, channel: Channel) -> bool:
        """Whether the server is there and does not answer, by all attempts to connect in the last seconds."""
        seen = self._seen(channel)
        return self.is_silence or is_silence(seen) or (is_refusal(seen) and is_listening(channel.address))

    def explain(self, channel: Channel, silence_s: float) -> str:
        """Say what was seen. Only a refused connection advises a start: a paused server would lose its tables by it."""
        seen = self._seen(channel)
        heard = f"last heard of {silence_s:.1f} s ago ({seen})"
        if self.is_silent(channel):
            return f"The server at {channel.address} does not answer, {heard}. It may be paused: look at its process."
        if is_refusal(seen):
            return f"The server at {channel.address} is gone, {heard}. Start it again."
        return f"There is no connection to the server at {channel.address}, {heard}. It is tried again and again."

    def _seen(self, channel: Channel) -> str:
        return "; ".join([self.reason.rstrip("."), *channel.recent_connect_errors()])
