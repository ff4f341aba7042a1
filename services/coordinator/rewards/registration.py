"""Rules for servers that are registered in a running run."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

from pydantic import ValidationError

from atoll.config.errors import ConfigError
from atoll.config.load import secret
from atoll.config.schema import ServerConfig
from atoll.external.addresses import AddressPolicy
from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer


@dataclass(frozen=True, slots=True)
class RegistrationRules:
    grader_names: Collection[str]  # names of reward servers used by graders
    addresses: AddressPolicy
    secrets: Collection[str]  # variables that `auth` may name; PREFIX* for all that begin so

    async def admit(self, server: ExternalServer) -> tuple[ExternalServer, str | None]:
        """Checks a server; returns it with its resolved address, and its token. Raises UserError."""
        _check(server)
        if server.kind == "reward" and server.name not in self.grader_names:
            graders = ", ".join(f"server:{name}" for name in self.grader_names) or "no server:NAME"
            raise UserError(
                f"reward server {server.name}: no grader uses it; reward.graders has {graders}: register it "
                f'under such a name, or start a run with {{ name = "server:{server.name}" }} there'
            )
        token = self._token(server)
        return replace(server, address=await self.addresses.locate(server)), token

    def readmit(self, server: ExternalServer) -> str | None:
        """The token of a server that was admitted before the coordinator restarted. Raises UserError if the
        run's config no longer allows it.
        """
        if not server.address:
            raise UserError(f"{server} was registered with an earlier version: register it again")
        self.addresses.check(server, server.address)
        return self._token(server)

    def _token(self, server: ExternalServer) -> str | None:
        """Whoever registers a server chooses where its token is sent. Unlisted and unset variables raise the
        same error, so that names cannot be guessed.
        """
        if not server.auth:
            return None
        name = server.auth.removeprefix("env:")
        if any(fnmatchcase(name, pattern) for pattern in self.secrets):
            with suppress(ConfigError):
                return secret(server.auth)
        raise UserError(
            f"{server}: auth = {server.auth}: the variable must be listed in coordinator.server_secrets of "
            "the run's config and set in the coordinator's environment"
        )


def _check(server: ExternalServer) -> None:
    """Raises UserError if it would be invalid in a [[servers]] table."""
    said = {name: value for name, value in asdict(server).items() if name != "address"}
    try:
        ServerConfig.model_validate(said)
    except ValidationError as error:
        problems = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise UserError(f"{server.kind} server {server.name}: {problems}") from None
