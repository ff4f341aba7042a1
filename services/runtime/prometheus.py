"""What a process serves to Prometheus: its resources, and the calls that its gRPC server handles."""

import errno
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, start_http_server

from atoll.config.schema import PrometheusSection
from atoll.runtime.errors import UserError
from atoll.runtime.server import advertised_host

_BUCKETS_S: Final = (0.001, 0.01, 0.1, 1, 10, 100, 1000)  # from a heartbeat to a step's generation
_MAX_TRIES: Final = 1000  # ports


class ProcessMetrics:
    """The metrics of one process, over all lives of its service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU seconds, memory, file descriptors, start time
        self.calls = Histogram(
            "grpc_server_handling_seconds",  # as gRPC servers usually name it, so that their dashboards work
            "Seconds of each gRPC call that has ended; of a stream, to its end",
            ("grpc_service", "grpc_method", "grpc_code"),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.address = ""  # of /metrics, while it is served

    def serve(self, section: PrometheusSection) -> None:
        """Serves /metrics in a thread as long as the process lives, unless that is off. Raises UserError if
        it can listen nowhere.
        """
        if not section.enabled:
            return
        for port in range(section.port, section.port + _MAX_TRIES):
            try:
                server, _ = start_http_server(port, section.host, self.registry)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise UserError(
                    f"prometheus.host = {section.host!r}: cannot listen on port {port}: {error.strerror}; "
                    "set it to an address of this machine, and prometheus.port to a port that you may use"
                ) from None
            self.address = f"{advertised_host(section.host)}:{server.server_port}"
            return
        raise UserError(
            f"prometheus.port = {section.port}: none of the {_MAX_TRIES} ports from there is free; set it to "
            "0 for any free port"
        )
