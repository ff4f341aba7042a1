"""A progress counter of this rank, polled by callers that wait for it.

A process is one rank, so there is one counter for all that it does, in any thread.
"""

_done = 0


def advance() -> None:
    """Counts a finished part of the work: a micro-batch, a tensor."""
    global _done
    _done += 1


def num_done() -> int:
    """The counter; only its changes are meaningful."""
    return _done
