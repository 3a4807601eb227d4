"""The turn of a server on its folder of checkpoints: it waits for its turn, and ends when the next server waits.

While it may have lost its turn without knowing, Reverb stands still and confirms nothing.
"""

from __future__ import annotations

import contextlib
import logging

from reverb_writer_server.checkpoints.claim import FolderClaim
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.supervisor import ReverbProcess

_logger = logging.getLogger(__name__)


class Turn:
    """The turn of one server; of a server that is to claim nothing it is always.

    Attributes:
        in_doubt: whether another server may have begun.
    """

    def __init__(self, config: ServerConfig, host: str | None, state: ServiceState) -> None:
        """Prepare.

        Args:
            config: what to serve.
            host: name of this machine for clients; None to claim nothing.
            state: is told what is waited for.
        """
        self._directory = None if host is None else config.checkpoints.directory
        self._address = f"{host}:{config.port}"
        self._state = state
        self._claim: FolderClaim | None = None
        self.in_doubt = False

    @property
    def is_claimed(self) -> bool:
        """Whether this server has claimed its checkpoints."""
        return self._claim is not None

    @property
    def is_over(self) -> bool:
        """Whether a newer server has claimed the checkpoints."""
        return self._claim is not None and self._claim.newer is not None

    def take(self, resources: contextlib.ExitStack) -> None:
        """Claim the checkpoints, and wait until no other server uses them; the thread that does the work calls it.

        Raises:
            ClaimError: a newer server has claimed them meanwhile.
            OSError: the claim cannot be written.
        """
        if self._directory is None:
            return
        self._claim = FolderClaim(self._directory, self._address, lambda: self._state.phase)
        resources.callback(self._claim.close)  # last of all: then nothing of this server is left
        self._claim.wait(self._tell)
        self._state.detail = ""

    def must_end_at_once(self, process: ReverbProcess | None) -> bool:
        """Stop Reverb as long as there is a doubt; the main thread calls it again and again.

        Returns:
            Whether a newer server may have begun in the doubt: then a last checkpoint would come too late.
        """
        if self._claim is None or (process is not None and not process.alive()):
            self.in_doubt = False
            return False
        was_in_doubt, self.in_doubt = self.in_doubt, self._claim.in_doubt()
        if self.in_doubt and not was_in_doubt:
            _logger.error("the folder of checkpoints does not answer: Reverb stands still, another server may begin")
        if self.in_doubt and process is not None:  # again each time, because it may have been started in the doubt
            process.suspend()
        elif was_in_doubt and not self.is_over and process is not None:
            process.resume()
        return was_in_doubt and not self.in_doubt and self.is_over

    def _tell(self, what: str) -> None:
        if what != self._state.detail:
            _logger.info("%s", what)
        self._state.detail = what
