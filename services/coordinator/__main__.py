"""The coordinator process: `python -m atoll.coordinator --config runs/NAME/config.json --store URL`."""

import argparse
import asyncio
import gc
import logging
import sys
from pathlib import Path
from typing import Final

from atoll.config.errors import ConfigError
from atoll.config.load import OPERATOR_TOKEN, access_token, optional_token, read_resolved
from atoll.config.schema import RunConfig
from atoll.coordinator.assembly import Assembly
from atoll.coordinator.background import first_cause
from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.fleet.run_end import RunEnd, clear_end, expected_services, mark_end, read_end
from atoll.coordinator.fleet.scaling import Scaling
from atoll.coordinator.gauges import RunCollector
from atoll.coordinator.journal.checkpoints import Checkpoints
from atoll.coordinator.journal.run_folder import check_folder, contains_run, run_id
from atoll.coordinator.progress_log import log_progress
from atoll.coordinator.rewards.registration import RegistrationRules
from atoll.coordinator.rewards.servers import Servers
from atoll.coordinator.service import OPERATORS_MAY, CoordinatorService
from atoll.coordinator.summary import Outcome
from atoll.external.addresses import AddressPolicy, is_loopback
from atoll.external.protocols import connect
from atoll.runtime.awake_loop import AwakeLoop
from atoll.runtime.clients.base import Caller
from atoll.runtime.dump import DUMPS, last_dump
from atoll.runtime.errors import AtollError, StoreError, UserError
from atoll.runtime.process import GARBAGE, announce, stop_signal
from atoll.runtime.prometheus import ProcessMetrics
from atoll.runtime.server import Server, TokenGrant
from atoll.runtime.store import Store
from atoll.runtime.telemetry import configure_logging, load_metrics

log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 2.0  # for calls in progress


class StoppedUnsavedError(AtollError):
    """The run was stopped by a signal, and finished steps are not in a checkpoint."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="atoll serve coordinator")
    parser.add_argument("--config", type=Path, required=True, help="path of the run's resolved config.json")
    parser.add_argument("--store", required=True, help="redis://, rediss:// or unix:// URL")
    parser.add_argument("--ready-fd", type=int, help="a pipe that receives a line once the service is ready")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    arguments = parser.parse_args()
    configure_logging("coordinator")
    gc.set_threshold(*GARBAGE)
    try:
        with asyncio.Runner(loop_factory=AwakeLoop) as runner:
            runner.run(
                run(read_resolved(arguments.config), arguments.store, arguments.ready_fd, arguments.resume)
            )
    except (ConfigError, UserError, StoppedUnsavedError) as error:
        sys.exit(f"coordinator: {error}")
    except StoreError as error:
        sys.exit(
            f"coordinator: the run needs its store, and continues with --resume once it answers: {error}"
        )
    except (AtollError, OSError) as error:
        log.exception("the run failed")
        sys.exit(f"coordinator: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # by the second Ctrl-C


async def run(config: RunConfig, store_url: str, ready_fd: int | None, resume: bool) -> None:
    """Serves until the run has ended. Raises the error that ended it, if any.

    SIGTERM or SIGINT stops the run after the step in progress; a second signal ends the process at once.
    """
    control = RunControl(
        trains=config.run.mode != "rollout_only",
        scaling=Scaling.of(config, has_launcher=ready_fd is not None),
    )
    serving = asyncio.create_task(serve(config, store_url, ready_fd, resume, control))
    with stop_signal() as asked:
        await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        await stop(serving, config, control)
    else:
        await serving


async def stop(serving: asyncio.Task[None], config: RunConfig, control: RunControl) -> None:
    """Ends `serving` after the step in progress.

    Waits for the run's end; unblocked by that, or once there is no step to finish. Raises StoppedUnsavedError
    if a finished step is not in a checkpoint.
    """
    log.warning("stopping after the step in progress; a second signal ends this process at once")
    await control.stop(hurry=True)
    idle = asyncio.create_task(_until_idle(control))
    await asyncio.wait((serving, idle), return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    serving.cancel()
    [ended], _ = await asyncio.wait((serving,))
    failure = None if ended.cancelled() else ended.exception()
    has_ended = not ended.cancelled() and failure is None
    rows = load_metrics(config.folder) if contains_run(config.folder) else []
    step = min(control.progress.step, int(rows[-1]["step"]) if rows else 0)  # a warm-up has steps of its own
    saved = await asyncio.to_thread(last_saved_step, config)
    if step > saved and not has_ended:
        raise StoppedUnsavedError(
            f"the run was stopped after step {step}, but its last checkpoint is that of step {saved}: "
            f"{failure or control.progress.error}; --resume repeats the steps after it"
        )
    log.info("the run was stopped after step %d and can continue with --resume", max(step, saved))


async def _until_idle(control: RunControl) -> None:
    """Returns once the run is in a state in which no step can be finished soon: before its first one, or
    while a trainer is away."""
    async for progress in control.changes():
        if progress.state in (RunState.STARTING, RunState.RECOVERING):
            return


def last_saved_step(config: RunConfig) -> int:
    """The step from which a resume continues; 0 if it starts from scratch."""
    if config.run.mode == "rollout_only":
        dump = last_dump(config.folder / DUMPS)
        return dump[0] if dump else 0
    return max(Checkpoints(config.folder / "checkpoints", config.checkpoint.keep).steps(), default=0)


async def serve(
    config: RunConfig, store_url: str, ready_fd: int | None, resume: bool, control: RunControl
) -> None:
    """Runs the coordinator, whose run `control` stops. Raises the error that ended the run, if any."""
    token, operator_token = access_token(), optional_token(OPERATOR_TOKEN)
    if not resume:
        check_folder(config.folder, resume=False)
    store = Store(store_url, config.run.name)
    await store.wait_until_ready(config.coordinator.start_timeout_s)
    await store.claim(run_id(config.folder))
    caller = Caller(await store.take_epoch(), token)
    registry = Registry(
        store.new_connection(), config.coordinator.lease_s
    )  # heartbeats must not wait for the journal
    section = config.coordinator
    servers = Servers(
        store,
        RegistrationRules(
            grader_names=config.reward.servers,
            addresses=AddressPolicy(section.server_networks, loopback=is_loopback(section.host)),
            secrets=section.server_secrets,
        ),
        wait_timeout_s=section.request_timeout_s,
        changed=control.report,
        connect=connect,
    )
    await servers.restore(resume=resume)
    is_launched = ready_fd is not None  # then services start and end with the launcher, not with the run
    end = await read_end(store) if resume and not is_launched else None
    metrics = ProcessMetrics()
    metrics.registry.register(RunCollector(lambda: control.progress, registry.services))
    metrics.serve(config.prometheus)
    server = await Server.start(
        "atoll.v1.Coordinator",
        CoordinatorService(config.run.name, registry, servers, control).add_to,
        host=config.coordinator.host,
        port=config.coordinator.port,
        token=token,
        setting="coordinator.port",
        operators=TokenGrant(operator_token, OPERATORS_MAY) if operator_token else None,
        calls=metrics.calls,
    )
    logging_progress = asyncio.create_task(log_progress(control))
    try:
        if ready_fd is not None:
            announce(ready_fd, server.address, metrics.address)
        if end and end.is_end_of(config.run):
            await send_services_home(end, config, registry, control)
            return
        await clear_end(store)
        outcome = await Assembly(config, store, registry, servers, control, caller).run(resume)
        log.info("the run has ended after step %d: %s", control.progress.step, outcome)
        if not is_launched:
            await end_run(outcome, store, config, registry, control)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        cause = first_cause(error)
        await control.report(state=RunState.FAILED, error=str(cause))
        raise cause from error
    finally:
        logging_progress.cancel()
        await server.stop(STOP_GRACE_S)
        await servers.close()
        await store.close()


async def end_run(
    outcome: Outcome, store: Store, config: RunConfig, registry: Registry, control: RunControl
) -> None:
    """Ends the services of a run that has ended. Those of a run that a signal has stopped wait for its next
    coordinator."""
    if outcome in (Outcome.FINISHED, Outcome.TARGET_REACHED):
        await mark_end(store, RunEnd(control.progress.step, config.run.steps, config.run.target_reward))
    elif control.hurries:
        return
    await registry.dismiss()


async def send_services_home(end: RunEnd, config: RunConfig, registry: Registry, control: RunControl) -> None:
    """For a run that ended in an earlier life of its coordinator: tells its services so as they start."""
    log.info(
        "the run has ended at step %d of %d; to train further, raise run.steps%s and start it again",
        end.step,
        end.num_steps,
        "" if end.target_reward is None else " and run.target_reward",
    )
    expected = expected_services(config)
    log.info(
        "telling its services as they register, for at most %g s (coordinator.start_timeout_s): %s",
        config.coordinator.start_timeout_s,
        ", ".join(f"{number} x {role}" for role, number in expected.items()),
    )
    await control.report(state=RunState.FINISHED, step=end.step, num_steps=end.num_steps)
    await control.run_unless_stopped(registry.send_home(expected, config.coordinator.start_timeout_s))


if __name__ == "__main__":
    main()
