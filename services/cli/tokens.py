"""Who may call a run's services: tokens that its launcher makes, and where commands find them.

The run's token opens every service; children get it by their environment. The operators' token opens what
people ask of a coordinator, and can be handed to them. Both lie in the run's folder while it is running,
readable by its owner alone.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from atoll.config.load import OPERATOR_TOKEN, TOKEN, given_token, write_private

TOKEN_FILE: Final = "coordinator.token"
OPERATOR_TOKEN_FILE: Final = "operator.token"


@dataclass(frozen=True, slots=True, repr=False)  # nor does a traceback show them
class Tokens:
    run: str
    operators: str

    @classmethod
    def of_this_run(cls) -> Self:
        """Those of the environment, else random ones."""
        return cls(*(given_token(name) or secrets.token_urlsafe() for name in (TOKEN, OPERATOR_TOKEN)))

    @property
    def environment(self) -> dict[str, str]:
        return {TOKEN: self.run, OPERATOR_TOKEN: self.operators}

    def write(self, folder: Path) -> None:
        write_private(folder / TOKEN_FILE, self.run)
        write_private(folder / OPERATOR_TOKEN_FILE, self.operators)


def remove(folder: Path) -> None:
    for name in (TOKEN_FILE, OPERATOR_TOKEN_FILE):
        (folder / name).unlink(missing_ok=True)
