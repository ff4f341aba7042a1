"""Errors that cross a service boundary. An error says what, got, expected, and what to do."""

import grpc


class AtollError(Exception):
    """Base of everything that Atoll raises on purpose."""

    code = grpc.StatusCode.INTERNAL


class UserError(AtollError, ValueError):
    """Something that the user can mend: config, data, model folder."""

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
    """The service has as much to do as it takes on: ask another one, or this one later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED  # not sent again by gRPC itself


class BadAnswerError(AtollError):
    """A peer or an external server sent something that its protocol does not allow."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class SandboxError(AtollError):
    """A sandbox could not be set up or is broken: says nothing about the program. Never a reward."""

    code = grpc.StatusCode.INTERNAL


class EngineDiedError(ServiceUnavailableError):
    """A replica's engine is gone; the replica builds another one, which has not got the weights yet."""

    code = grpc.StatusCode.ABORTED  # gRPC itself sends what is UNAVAILABLE again, to the same address


class ReplacedError(AtollError):
    """A newer process has registered under the same name: this one has no work left."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class StoreError(AtollError):
    """The store is away or refused a command. A write that was under way may have happened or not."""

    code = grpc.StatusCode.UNAVAILABLE


class WeightPushError(AtollError):
    """A slice is missing or its checksum differs; nothing was committed."""

    code = grpc.StatusCode.DATA_LOSS


class LostStateError(AtollError):
    """The service restarted and no longer holds what the call builds on: restore a checkpoint."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class MemoryExhaustedError(Exception):
    """A rank asked for memory that is not there. It may hold half an update, and its peers wait for the other
    half: not an AtollError, after which a service goes on, but the end of its process."""


class CheckpointError(AtollError):
    """A checkpoint could not be written, as on a full disk; those before it are untouched."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
