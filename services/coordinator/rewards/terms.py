"""The terms on which a running run takes in a server that somebody registers."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

from pydantic import ValidationError

from atoll.config.errors import ConfigError
from atoll.config.load import secret
from atoll.config.schema import ServerConfig
from atoll.external.addresses import Addresses
from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer


@dataclass(frozen=True, slots=True)
class Terms:
    asked: Collection[str]  # names of reward servers that graders ask
    addresses: Addresses
    secrets: Collection[str]  # variables that `auth` may name; PREFIX* for all that begin so

    async def accepted(self, server: ExternalServer) -> tuple[ExternalServer, str | None]:
        """The server with the address that it is called at, and its token. Raises UserError."""
        _check(server)
        if server.kind == "reward" and server.name not in self.asked:
            graders = ", ".join(f"server:{name}" for name in self.asked) or "no server:NAME"
            raise UserError(
                f"reward server {server.name}: no grader asks it; reward.graders has {graders}: register it "
                f'under such a name, or start a run with {{ name = "server:{server.name}" }} there'
            )
        token = self._token(server)
        return replace(server, address=await self.addresses.locate(server)), token

    def kept(self, server: ExternalServer) -> str | None:
        """The token of a server that was accepted before the coordinator was restarted. Raises UserError if
        the run's file does not allow it any more."""
        if not server.address:
            raise UserError(f"{server} was registered with an earlier version: register it again")
        self.addresses.check(server, server.address)
        return self._token(server)

    def _token(self, server: ExternalServer) -> str | None:
        """Who registers a server says where its token is sent. The error is the same for a variable that is
        not listed and for one that is not set, since it may be a stranger who guesses names."""
        if not server.auth:
            return None
        name = server.auth.removeprefix("env:")
        if any(fnmatchcase(name, pattern) for pattern in self.secrets):
            with suppress(ConfigError):
                return secret(server.auth)
        raise UserError(
            f"{server}: auth = {server.auth}: the variable has to be listed in coordinator.server_secrets of "
            "the run's file, and set in the coordinator's environment"
        )


def _check(server: ExternalServer) -> None:
    """Raises UserError if it is not what the table [[servers]] may say."""
    said = {name: value for name, value in asdict(server).items() if name != "address"}
    try:
        ServerConfig.model_validate(said)
    except ValidationError as error:
        problems = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise UserError(f"{server.kind} server {server.name}: {problems}") from None
