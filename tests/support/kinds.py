"""Marks for tests that would find no more on all three kinds of servers; `server_process.py` says what each is."""

from __future__ import annotations

import pytest

contents = pytest.mark.only_server(
    "reverb", "inside", "what is in items does not depend on how bytes come to a local server: dm-reverb has a socket"
)
by_socket = pytest.mark.only_server(
    "reverb", "local", "another program reaches a local server by its socket, in whichever process that server is"
)
client_alone = pytest.mark.only_server("inside", "the client decides it alone, whatever the server is")
client_by_socket = pytest.mark.only_server("local", "the client decides it alone, and it is about connections")
both_ways = pytest.mark.only_server(
    "local", "inside", "it is about the client's ends of a socket and of no socket, and dm-reverb has the same socket"
)
