"""What a process serves to Prometheus, scraped over HTTP and read by Prometheus' own parser."""

import json
from pathlib import Path

import pytest

from atoll.cli.launch.processes import ScrapeTargets
from atoll.config.schema import PrometheusSection
from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.gauges import RunCollector
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import UserError
from atoll.runtime.prometheus import ProcessMetrics
from atoll.wire.types import ServiceEntry
from tests.coordinator_server import serve_coordinator
from tests.scraping import scrape
from tests.tokens import CALLER


async def test_calls_are_counted_by_method_and_code_and_the_run_is_shown() -> None:
    metrics, control = ProcessMetrics(), RunControl(trains=False)
    services = [ServiceEntry("rollout", f"rollout-{index}", "a", f"x:{index}") for index in range(2)]
    metrics.registry.register(RunCollector(lambda: control.progress, lambda: services))
    metrics.serve(PrometheusSection())
    server = await serve_coordinator(control, calls=metrics.calls)
    client = CoordinatorClient(server.address, CALLER)
    for _ in range(3):
        await client.status()
    with pytest.raises(UserError, match="has no trainer to save"):
        await client.checkpoint()
    await control.report(
        state=RunState.TRAINING, step=7, num_steps=9, version=5, metrics={"critic/score/mean": 0.25}
    )
    await client.close()
    await server.stop(0)
    found = scrape(metrics.address)
    calls, service = "grpc_server_handling_seconds", "atoll.v1.Coordinator"
    assert found[f"{calls}_count", "OK", "Status", service] == 3
    assert found[f"{calls}_count", "INVALID_ARGUMENT", "Checkpoint", service] == 1
    assert found[f"{calls}_sum", "OK", "Status", service] > 0
    assert [found[(f"atoll_{name}",)] for name in ("step", "num_steps", "version")] == [7, 9, 5]
    assert found["atoll_state", "training"] == 1
    assert found["atoll_state", "starting"] == 0
    assert found["atoll_services", "rollout"] == 2
    assert found["atoll_metric", "critic/score/mean"] == 0.25
    assert found[("process_open_fds",)] > 0
    assert found[("process_resident_memory_bytes",)] > 1 << 20
    assert found[("process_cpu_seconds_total",)] > 0


def test_a_port_that_is_taken_is_left_to_its_owner() -> None:
    first, second, off = ProcessMetrics(), ProcessMetrics(), ProcessMetrics()
    first.serve(PrometheusSection())
    port = int(first.address.rpartition(":")[2])
    second.serve(PrometheusSection(port=port))
    assert int(second.address.rpartition(":")[2]) > port
    assert ("process_open_fds",) in scrape(second.address)
    off.serve(PrometheusSection(enabled=False))
    assert off.address == ""
    with pytest.raises(UserError, match=r"prometheus\.host = '192\.0\.2\.1': cannot listen on port 0"):
        ProcessMetrics().serve(PrometheusSection(host="192.0.2.1"))  # of no machine: RFC 5737


def test_targets_are_listed_as_prometheus_reads_them_while_the_run_lives(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.json"
    with ScrapeTargets(path, "toy") as targets:
        targets.put("coordinator", "127.0.0.1:1")
        targets.put("rollout-0", "127.0.0.1:2")
        targets.put("rollout-0", "127.0.0.1:3")  # it was restarted
        assert json.loads(path.read_text()) == [
            {"targets": ["127.0.0.1:1"], "labels": {"run": "toy", "service": "coordinator"}},
            {"targets": ["127.0.0.1:3"], "labels": {"run": "toy", "service": "rollout-0"}},
        ]
    assert list(tmp_path.iterdir()) == []
