"""Runs the files of deploy/compose, and looks at what runs there from outside."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = Path(__file__).parents[2] / "deploy" / "compose"
HANG_S = 600  # a bound that only a hang reaches

Row = Mapping[str, Any]


def docker(*words: str) -> str:
    return run("docker", *words)


def run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Its standard output, from the folder in which Compose is called. Raises AssertionError if it fails."""
    answer = subprocess.run(
        words,
        cwd=FILES,  # Compose 1.29 looks for the seccomp profile there
        capture_output=True,
        text=True,
        timeout=3 * HANG_S,
        env={**os.environ, **(environment or {})},
    )
    assert answer.returncode == 0, f"{words}: {answer.stdout}{answer.stderr}"
    return answer.stdout


class Lines:
    """What a command prints, line by line, to wait for some of it."""

    def __init__(self, *command: str) -> None:
        words = ("timeout", str(HANG_S), *command)
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait(self, fits: Callable[[str], bool]) -> str:
        """The next line that fits. Raises AssertionError with the last ones if the command ends before."""
        assert self._process.stdout is not None
        seen: list[str] = []
        for line in self._process.stdout:
            if fits(line):
                return line
            seen.append(line)
        raise AssertionError(f"{self._process.args!r} ended without it: {''.join(seen[-20:])}")

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Project:
    """A Compose project: one run."""

    name: str
    overlays: Sequence[str]  # "reward-server": of deploy/compose/reward-server.yaml
    environment: Mapping[str, str]
    program: str = os.environ.get("COMPOSE_2", "")

    def compose(self, *words: str) -> str:
        files = [word for name in ("compose", *self.overlays) for word in ("-f", f"{name}.yaml")]
        options = ("-p", self.name, "--env-file", ".env.example", *files, "--profile", "cpu")
        return run(self.program, *options, *words, environment=self.environment)

    def up(self, *words: str) -> None:
        self.compose("up", "--detach", *words)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", service).split()

    def container(self, service: str) -> str:
        (only,) = self.containers(service)
        return only

    def leftovers(self) -> dict[str, str]:
        """Ids of what the engine still has of this project."""
        of_project = ("--filter", f"label=com.docker.compose.project={self.name}")
        return {
            "containers": docker("ps", "--all", "--quiet", *of_project),
            "networks": docker("network", "ls", "--quiet", *of_project),
            "volumes": docker("volume", "ls", "--quiet", *of_project),
        }

    def read(self, path: str) -> str:
        """A file of the run's volume, while no service has to run."""
        return docker("run", "--rm", "--volume", f"{self.name}_runs:/app/runs:ro", self.image, "cat", path)

    @property
    def run_name(self) -> str:
        return self.environment.get("RUN_NAME", "quickstart")

    @property
    def image(self) -> str:
        return self.environment["LIGHT_IMAGE"]

    @contextmanager
    def rows(self) -> Iterator[Callable[[Callable[[Row], bool]], Row]]:
        """Waits for a step's metrics that fit, from the first one on; survives stops of the run."""
        watch = f"{self.name}-watch"
        mount = ("--volume", f"{self.name}_runs:/app/runs:ro", "--network", "none")
        tail = ("tail", "--lines", "+1", "-F", f"runs/{self.run_name}/metrics.jsonl")
        lines = Lines("docker", "run", "--rm", "--name", watch, *mount, self.image, *tail)

        def wait(fits: Callable[[Row], bool]) -> Row:
            line = lines.wait(lambda line: line.startswith("{") and fits(json.loads(line)))
            row: Row = json.loads(line)
            return row

        try:
            yield wait
        finally:
            docker("rm", "--force", watch)
            lines.close()


def inspect(container: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container))
    return dict(found)


def main_process(container: str) -> int:
    """Its first process, as this machine numbers it."""
    return int(inspect(container)["State"]["Pid"])


def kill_and_wait_for_restart(container: str) -> float:
    """By SIGKILL from outside of Docker, which does not restart what `docker kill` ended. Returns when it
    started again, in Unix seconds."""
    now = docker("info", "--format", "{{.SystemTime}}").strip()
    starts = Lines(
        *("docker", "events", "--since", now, "--format", "{{.TimeNano}}"),
        *("--filter", f"container={container}", "--filter", "event=start"),
    )
    os.kill(main_process(container), signal.SIGKILL)
    nanoseconds = starts.wait(lambda line: True)
    starts.close()
    return int(nanoseconds) / 1e9
