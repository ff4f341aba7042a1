"""Command-line arguments that describe an external server, as a [[servers]] table does."""

import argparse
from typing import get_args

from atoll.config.schema import ServerConfig
from atoll.runtime.errors import UserError
from atoll.wire.types import ExternalServer

FIELDS = ServerConfig.model_fields
KINDS = get_args(FIELDS["kind"].annotation)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but kind, name and URL, whose positions differ between commands."""
    parser.add_argument("--protocol", required=True, choices=get_args(FIELDS["protocol"].annotation))
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the protocol; may be repeated",
    )
    parser.add_argument(
        "--auth",
        default="",
        metavar="env:VARIABLE",
        help="variable that holds the bearer token (for register: in the coordinator's environment)",
    )
    parser.add_argument(
        "--concurrency", type=int, default=FIELDS["concurrency"].default, metavar="N", help="concurrent calls"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=FIELDS["timeout_s"].default,
        metavar="SECONDS",
        help="timeout of one call",
    )


def parse_server(arguments: argparse.Namespace, name: str) -> ExternalServer:
    """Raises UserError if an option has no value."""
    return ExternalServer(
        kind=arguments.kind,
        name=name,
        url=arguments.url,
        protocol=arguments.protocol,
        options=dict(_option(text) for text in arguments.option),
        auth=arguments.auth,
        concurrency=arguments.concurrency,
        timeout_s=arguments.timeout,
    )


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UserError(f"--option {text}: expected KEY=VALUE, as in --option preset=slime")
    return key, value
