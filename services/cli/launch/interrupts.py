"""Stops a run after the step in progress: by Ctrl-C, a signal, or `atoll stop`."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import ServiceUnavailableError

_log = logging.getLogger(__name__)

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_RETRY_S = 1.0  # before asking again a coordinator that did not answer


@contextmanager
def handle_interrupts(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT, SIGTERM or SIGHUP sets `stop`; a second one cancels the calling task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def interrupt(number: signal.Signals) -> None:
        if stop.is_set():
            task.cancel()
        stop.set()
        if number == signal.SIGHUP:  # the terminal is gone: what is printed from now on would raise
            with open(os.devnull, "w") as nowhere:
                for descriptor in terminals:
                    os.dup2(nowhere.fileno(), descriptor)

    is_under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signals = [n for n in INTERRUPTS if not (n == signal.SIGHUP and is_under_nohup)]
    for number in signals:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def stop_run(stop: asyncio.Event, client: CoordinatorClient) -> None:
    """Asks the coordinator to stop the run once `stop` is set, and shows what it is waiting for: the current
    step and a checkpoint. Returns if there is nothing to finish.
    """
    await stop.wait()
    await follow_stop(client, advice="interrupt again to stop immediately", unless=("starting", "recovering"))


async def follow_stop(
    client: CoordinatorClient,
    *,
    advice: str,
    unless: Sequence[str] = (),
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Asks the coordinator to stop the run and shows what it is waiting for, until the coordinator does not
    answer any more and the run `is_over`. Returns if the run is in one of the states `unless`.
    """
    seen, shown, is_told = 0, "", False
    while True:
        try:
            status = await client.status(seen)
            if status.state in unless:
                return
            if not is_told:
                await client.stop_run()
                is_told = True
        except ServiceUnavailableError as error:  # busy, or already ending
            if is_over():
                return
            waits_for = f"the coordinator to answer ({error})"
            await asyncio.sleep(STOP_RETRY_S)
        else:
            seen = status.revision
            waits_for = f"the run, which is {status.state} after step {status.step} of {status.num_steps}"
        if waits_for != shown:
            _log.warning("stopping: waiting for %s; %s", waits_for, advice)
            shown = waits_for
