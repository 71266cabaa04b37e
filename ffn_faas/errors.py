"""Every error that a user can meet: one hierarchy, each class with its exit code, HTTP status and remedy."""

from __future__ import annotations


class FfnError(Exception):
    """Base of all errors this package raises on purpose.

    ``exit_code`` is what the process ends with when the error reaches the top (docs/operations.md holds the
    table); ``http_status`` is what a request that meets it is answered with. ``remedy`` says what the reader can do.
    """

    exit_code = 1
    http_status = 500

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UsageError(FfnError):
    """The command line, a setting or a request is off."""

    exit_code = 2
    http_status = 400


class LaunchDisagreement(FfnError):
    """Two parts of F's own launch contradict each other (WORLD_SIZE, --data-parallel-size, num_ffn_ranks ...)."""

    exit_code = 3
    http_status = 409


class ModelRefused(FfnError):
    """The checkpoint holds experts that this version cannot serve."""

    exit_code = 3
    http_status = 409


class HandshakeRefused(FfnError):
    """F refused this Attention rank; the text is F's own, the same on both sides."""

    exit_code = 3
    http_status = 409


class WorldLost(FfnError):
    """A rank of the F world is gone, so that the others cannot serve."""

    exit_code = 4
    http_status = 503


class SessionLost(FfnError):
    """The peer of an attached session is gone, or ended it."""

    exit_code = 4
    http_status = 503


class Stuck(FfnError):
    """Something did not end inside its budget and was forced."""

    exit_code = 5
    http_status = 503


class ResourceError(FfnError):
    """Memory, disk, a port, a device or a file is missing, full, taken or broken."""

    exit_code = 6
    http_status = 503


class NativeMissing(ResourceError):
    """The compiled part of the package is absent from this installation."""
