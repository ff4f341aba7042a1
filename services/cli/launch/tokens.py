"""Access tokens of a run's services: made by the launcher, found by commands.

The run's token gives access to every service; child processes get it through the environment. The operators'
token gives access to the coordinator's operator methods only. Both are in the run's folder while it is
running, readable only by its owner.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from atoll.config.load import OPERATOR_TOKEN, TOKEN, optional_token, write_private

TOKEN_FILE: Final = "coordinator.token"
OPERATOR_TOKEN_FILE: Final = "operator.token"


@dataclass(frozen=True, slots=True, repr=False)  # so that tracebacks do not show them
class Tokens:
    run: str
    operators: str

    @classmethod
    def of_this_run(cls) -> Self:
        """Tokens from the environment, otherwise random ones."""
        return cls(*(optional_token(name) or secrets.token_urlsafe() for name in (TOKEN, OPERATOR_TOKEN)))

    @property
    def environment(self) -> dict[str, str]:
        return {TOKEN: self.run, OPERATOR_TOKEN: self.operators}

    def write(self, folder: Path) -> None:
        write_private(folder / TOKEN_FILE, self.run)
        write_private(folder / OPERATOR_TOKEN_FILE, self.operators)


def remove(folder: Path) -> None:
    for name in (TOKEN_FILE, OPERATOR_TOKEN_FILE):
        (folder / name).unlink(missing_ok=True)
