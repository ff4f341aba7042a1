"""The token of services that tests start by hand; conftest.py hands it to their child processes."""

from typing import Final

from atoll.runtime.clients.base import Caller

TOKEN: Final = "a-token-of-the-tests"
CALLER: Final = Caller(fence=1, token=TOKEN)
