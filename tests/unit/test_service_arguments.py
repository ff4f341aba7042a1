"""What a service that is started by hand is called."""

import pytest

from atoll.runtime.process import parse_arguments


@pytest.mark.parametrize(
    ("service", "arguments", "name"),
    [
        ("rollout", [], "rollout-3f2a91.local"),
        ("gateway", ["--store", "redis://h:1/0"], "gateway-3f2a91.local"),
        ("reward", ["--name", "reward-0"], "reward-0"),
        ("trainer", ["--role", "critic"], "critic-2"),
    ],
)
def test_a_service_is_named_after_its_host_and_a_trainer_after_its_rank(
    monkeypatch: pytest.MonkeyPatch, service: str, arguments: list[str], name: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "3f2a91.local")
    monkeypatch.setattr("sys.argv", ["atoll", "--config", "config.json", *arguments])
    monkeypatch.setenv("RANK", "2")
    assert parse_arguments(service).name == name
