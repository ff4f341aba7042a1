"""In place of torch_memory_saver, which has no build for a CPU: memory stays where it is, and each call adds
a line to the file that ATOLL_TEST_MEMORY_CALLS names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MemorySaver:
    enabled = True

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def pause(self, tag: str) -> None:
        self._record(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self._record(f"resume {tag}")

    def _record(self, call: str) -> None:
        with Path(os.environ["ATOLL_TEST_MEMORY_CALLS"]).open("a") as file:
            file.write(f"{call}\n")


torch_memory_saver = MemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    yield
