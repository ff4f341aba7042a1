"""Errors that cross a service boundary. An error says what, got, expected, and what to do."""

import grpc


class AtollError(Exception):
    """Base class of errors that Atoll raises deliberately."""

    code = grpc.StatusCode.INTERNAL


class UserError(AtollError, ValueError):
    """An error that the user can fix: in the config, the data or a model folder."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class UnauthenticatedError(AtollError):
    """The call carries no token, or another one than the service's."""

    code = grpc.StatusCode.UNAUTHENTICATED


class StaleFenceError(AtollError):
    """The caller's lease epoch is lower than one seen before: another coordinator took over."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ServiceUnavailableError(AtollError):
    """The peer did not answer within the deadline, or the connection broke. Retry is safe."""

    code = grpc.StatusCode.UNAVAILABLE


class OverloadedError(ServiceUnavailableError):
    """The service is at its limit: try another one, or this one later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED  # not retried by gRPC itself


class ProtocolError(AtollError):
    """A response violates the protocol, from a peer or an external server."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class SandboxError(AtollError):
    """A sandbox could not be set up or is broken. Not the program's fault; never a reward."""

    code = grpc.StatusCode.INTERNAL


class EngineDiedError(ServiceUnavailableError):
    """A replica's engine died; the replica starts another one, which lacks the current weights."""

    code = grpc.StatusCode.ABORTED  # gRPC itself sends what is UNAVAILABLE again, to the same address


class ReplacedError(AtollError):
    """A newer process has registered under the same name: this one must stop."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class RunEndedError(AtollError):
    """The run has ended, and its services with it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class StoreError(AtollError):
    """The store is unavailable or refused a command. A pending write may or may not have happened."""

    code = grpc.StatusCode.UNAVAILABLE


class WeightPushError(AtollError):
    """A slice is missing or its checksum differs; nothing was committed."""

    code = grpc.StatusCode.DATA_LOSS


class DivergedError(AtollError):
    """The policy computes numbers that are not finite: its last update is no good."""


class LostStateError(AtollError):
    """The service restarted and no longer holds what the call builds on: restore a checkpoint."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class MemoryExhaustedError(Exception):
    """A rank is out of memory. It may hold half an update while its peers wait for the rest, so its process
    must end: unlike after an AtollError, the service cannot continue.
    """


class CheckpointError(AtollError):
    """A checkpoint could not be written, as on a full disk; those before it are untouched."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DamagedCheckpointError(UserError):
    """A checkpoint lacks a file, or one of its files is cut off or unreadable."""
