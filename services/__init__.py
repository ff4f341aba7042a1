"""Names to write against: `from atoll import AgentSession, Grade, ScoreItem`.

Each is imported when it is first asked for, so `import atoll` alone loads neither torch nor gRPC nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "AgentSession",
    "EnvironmentFailedError",
    "Grade",
    "Sample",
    "ScoreItem",
    "Trajectory",
    "load_config",
    "load_metrics",
    "read_samples",
    "run",
]

if TYPE_CHECKING:
    from atoll.agents.session import AgentSession, EnvironmentFailedError
    from atoll.cli.run import follow_to_end as run
    from atoll.config.load import load as load_config
    from atoll.runtime.samples import Sample, read_samples
    from atoll.runtime.telemetry import load_metrics
    from atoll.wire.types import Grade, ScoreItem, Trajectory
else:
    _PLACES = {
        "AgentSession": ("atoll.agents.session", "AgentSession"),
        "EnvironmentFailedError": ("atoll.agents.session", "EnvironmentFailedError"),
        "Grade": ("atoll.wire.types", "Grade"),
        "Trajectory": ("atoll.wire.types", "Trajectory"),
        "Sample": ("atoll.runtime.samples", "Sample"),
        "ScoreItem": ("atoll.wire.types", "ScoreItem"),
        "load_config": ("atoll.config.load", "load"),
        "load_metrics": ("atoll.runtime.telemetry", "load_metrics"),
        "read_samples": ("atoll.runtime.samples", "read_samples"),
        "run": ("atoll.cli.run", "follow_to_end"),
    }

    def __getattr__(name):
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _PLACES[name]
        return getattr(import_module(module), attribute)
