"""Health, models, rewards and the operator's view, over HTTP."""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from starlette.exceptions import HTTPException

from atoll.gateway.apis.base import Api
from atoll.gateway.apis.json_body import parse_json
from atoll.gateway.apis.models import describe_model, list_models
from atoll.gateway.conversation import RequestError
from atoll.gateway.http_server import bearer_key
from atoll.gateway.sessions import Sessions

MAX_REWARD: Final = 1e9  # sums and squares of such rewards are finite in any float


class RewardBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: Annotated[FiniteFloat, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
    turn: str | None = None  # id of an answer; none: the whole session
    component: Annotated[str, Field(max_length=100)] = "session"


def control_app(
    sessions: Sessions,
    apis: Mapping[str, Api],
    *,
    model: str,
    created: int,
    operator_tokens: frozenset[str],
) -> FastAPI:
    """`model`: under which the policy is listed; requests may call it anything."""
    app = FastAPI(
        title="Atoll gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        is_anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
        api = apis["/v1/messages" if is_anthropic else "/v1/chat/completions"]
        return JSONResponse(api.error(error), error.status)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> JSONResponse:
        kind = "invalid_request" if error.status_code == 400 else "not_found"
        what = f"{request.method} {request.url.path}: {error.detail}; expected POST {', '.join(apis)}"
        return await refuse(request, RequestError(error.status_code, kind, what))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, RequestError(500, "internal", "the gateway failed; see its log"))

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: ValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return await refuse(request, RequestError(400, "invalid_request", f"{where}: {first['msg']}"))

    @app.api_route("/", methods=["GET", "HEAD"])
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        await sessions.of_agent(bearer_key(request.scope))
        return list_models(model, created, anthropic="anthropic-version" in request.headers)

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> dict[str, Any]:
        await sessions.of_agent(bearer_key(request.scope))
        return describe_model(name, created, anthropic="anthropic-version" in request.headers)

    @app.post("/sessions/reward")
    async def reward(request: Request) -> dict[str, str]:
        key = bearer_key(request.scope)
        body = RewardBody.model_validate(parse_json(await request.body()))
        call = request.headers.get("idempotency-key") or secrets.token_hex(8)
        await sessions.reward(key, call, body.value, body.component, body.turn)
        return {"status": "ok"}

    @app.get("/sessions")
    async def summaries(request: Request) -> dict[str, Any]:
        key = bearer_key(request.scope).encode()
        if not any(hmac.compare_digest(key, token.encode()) for token in operator_tokens):
            raise RequestError(403, "permission", "only the operator's token may list sessions")
        return {
            "sessions": [{**asdict(summary), "id": str(summary.id)} for summary in sessions.summaries()],
            "counters": sessions.counters,
        }

    return app
