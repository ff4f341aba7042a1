"""Faults that a server of the tests has once: it hangs, or its process dies."""

import asyncio
import os
from pathlib import Path


async def misbehave(folder: Path, how: str) -> None:
    """The first time that it is told to "hang" or to "die"; nothing at any later time. `folder` remembers."""
    mark = folder / how
    if mark.exists():
        return
    mark.touch()
    if how == "die":
        os._exit(1)
    await asyncio.Event().wait()
