"""Health, models, rewards and the operator's view, over HTTP."""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, FiniteFloat
from starlette.exceptions import HTTPException

from atoll.gateway.apis.base import Api
from atoll.gateway.apis.models import describe_model, list_models
from atoll.gateway.conversation import RequestError
from atoll.gateway.http_server import bearer_key
from atoll.gateway.sessions import Sessions


class RewardBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: FiniteFloat
    turn: str | None = None  # id of an answer; none: the whole session
    component: str = "session"


def control_app(
    sessions: Sessions,
    apis: Mapping[str, Api],
    *,
    model: str,
    created: int,
    operator_tokens: frozenset[str],
) -> FastAPI:
    """`model`: under which the policy is listed; requests may call it anything."""
    app = FastAPI(title="Atoll gateway", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        content = {"error": {"message": str(error), "type": error.kind, "code": error.kind}}
        return JSONResponse(content, error.status)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        api = apis["/v1/messages" if path.startswith("/v1/messages") else "/v1/chat/completions"]
        what = f"{request.method} {path}: {error.detail}; expected POST {', '.join(apis)}"
        content = api.error(RequestError(error.status_code, "not_found", what))
        return JSONResponse(content, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
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
    async def reward(request: Request, body: RewardBody) -> dict[str, str]:
        call = request.headers.get("idempotency-key") or secrets.token_hex(8)
        await sessions.reward(bearer_key(request.scope), call, body.value, body.component, body.turn)
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
