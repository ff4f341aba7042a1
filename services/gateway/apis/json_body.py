"""Reads a request's body."""

from typing import Any

import orjson

from atoll.gateway.conversation import RequestError


def parse_json(content: bytes) -> dict[str, Any]:
    """Raises RequestError(400, "invalid_request") for what is no JSON object: invalid UTF-8, lone surrogates,
    more than 1,024 levels."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "invalid_request", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, "invalid_request", f"body: got {type(body).__name__}, expected a JSON object")
    return body
