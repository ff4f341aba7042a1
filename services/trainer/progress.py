"""How much this rank has done: whoever waits for it sees that it gets on with its work.

A process is one rank, so there is one counter for all that it does, in any thread.
"""

_done = 0


def advance() -> None:
    """A part of the work is done: a micro-batch, a tensor."""
    global _done
    _done += 1


def done() -> int:
    """Changes with each part; says nothing else."""
    return _done
