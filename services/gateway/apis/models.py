"""GET /v1/models: lists one model, the policy."""

from datetime import UTC, datetime
from typing import Any


def describe_model(name: str, created: int, *, anthropic: bool) -> dict[str, Any]:
    """`created`: Unix seconds."""
    if not anthropic:
        return {"id": name, "object": "model", "created": created, "owned_by": "atoll"}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
    }


def list_models(model: str, created: int, *, anthropic: bool) -> dict[str, Any]:
    data = [describe_model(model, created, anthropic=anthropic)]
    if not anthropic:
        return {"object": "list", "data": data}
    return {"data": data, "has_more": False, "first_id": model, "last_id": model}
