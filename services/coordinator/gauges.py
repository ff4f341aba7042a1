"""What the coordinator serves to Prometheus beside its process: the run's state and latest metrics."""

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from atoll.coordinator.control import RunProgress, RunState
from atoll.wire.types import ServiceEntry


class RunCollector(Collector):
    """Reads at each scrape, in a thread of its own, what the coordinator replaces as a whole."""

    def __init__(
        self,
        progress: Callable[[], RunProgress],
        services: Callable[[], Iterable[ServiceEntry]],
    ) -> None:
        self._progress = progress
        self._services = services

    def collect(self) -> Iterable[GaugeMetricFamily]:
        progress = self._progress()
        yield GaugeMetricFamily("atoll_step", "Last finished step", progress.step)
        yield GaugeMetricFamily("atoll_num_steps", "Steps of the run", progress.num_steps)
        yield GaugeMetricFamily("atoll_version", "Number of the policy version", progress.version)
        state = GaugeMetricFamily("atoll_state", "1 for the state of the run", labels=["state"])
        for each in RunState:
            state.add_metric([each.value], float(each is progress.state))
        yield state
        services = GaugeMetricFamily("atoll_services", "Registered services", labels=["role"])
        for role, count in Counter(entry.role for entry in self._services()).items():
            services.add_metric([role], count)
        yield services
        metrics = GaugeMetricFamily(
            "atoll_metric", "The last step's metrics, named as in metrics.jsonl", labels=["name"]
        )
        for name, value in progress.metrics.items():
            metrics.add_metric([name], value)
        yield metrics
