"""Every error that reverb_writer raises on purpose.

    ReverbWriterError
    ├── SpecError               (ValueError)       an argument or a configuration that can never work
    │   ├── OutOfRangeError     (IndexError)       an index where there is no data
    │   └── UnknownKeyError     (KeyError)         a name under which there is no data
    ├── StructureError          (ValueError)       a step, leaf or table of the wrong structure, dtype or shape
    ├── MissingExtraError       (ImportError)      an optional package is not installed
    ├── IncompleteError         (RuntimeError)     data was requested that is not complete yet
    ├── ClosedError             (RuntimeError)     a resource was used after close(), or in a forked child
    ├── FinishedError           (RuntimeError)     the learner has ended the run, so the call would wait for ever
    ├── ServerUnavailableError  (ConnectionError)  no server answers at the address
    ├── PermissionDeniedError   (PermissionError)  a gateway refuses this client the call
    ├── ReplayTimeoutError      (TimeoutError)     the server answers, but the time is up; the message names the cause
    ├── FormatError             (ValueError)       bytes or files in an unexpected format
    └── UnsafeDataError         (ValueError)       data that could run code or exhaust memory if it were decoded

Each error also derives from the expected built-in error, so that `except ValueError` and `except TimeoutError` work. A
call that raises has changed nothing.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "FinishedError",
    "FormatError",
    "IncompleteError",
    "MissingExtraError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ReplayTimeoutError",
    "ReverbWriterError",
    "ServerUnavailableError",
    "SpecError",
    "StructureError",
    "UnknownKeyError",
    "UnsafeDataError",
]

DOCS = "https://reverb-writer.readthedocs.io/en/latest"
"""Address of the documentation site; messages link to its pages."""


class ReverbWriterError(Exception):
    """Base of every error of this package."""


class SpecError(ReverbWriterError, ValueError):
    """An argument or a configuration that can never work."""


class OutOfRangeError(SpecError, IndexError):
    """An index where there is no data."""


class UnknownKeyError(SpecError, KeyError):
    """A name under which there is no data."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class StructureError(ReverbWriterError, ValueError):
    """A step, a leaf or a table whose structure, dtype or shape is not the expected one."""


class IncompleteError(ReverbWriterError, RuntimeError):
    """Data was requested that is not complete yet."""


class MissingExtraError(ReverbWriterError, ModuleNotFoundError):
    """An optional package that this call needs is not installed; the message has the command to install it."""


class ClosedError(ReverbWriterError, RuntimeError):
    """A resource was used after `close()`, or in a process forked from its owner."""


class FinishedError(ReverbWriterError, RuntimeError):
    """The learner has ended the run, so the call would wait for ever."""


class ServerUnavailableError(ReverbWriterError, ConnectionError):
    """No server answers at the address."""


class PermissionDeniedError(ReverbWriterError, PermissionError):
    """A gateway in front of the server refuses this client the call; the message is the gateway's."""


class ReplayTimeoutError(ReverbWriterError, TimeoutError):
    """The time is up; the message names the cause and its numbers."""


class FormatError(ReverbWriterError, ValueError):
    """Bytes or files in an unexpected format."""


class UnsafeDataError(ReverbWriterError, ValueError):
    """Data that could run code or exhaust memory if it were decoded."""
