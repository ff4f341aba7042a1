"""The coordinator process: `python -m atoll.coordinator --config runs/NAME/config.json --store URL`."""

import argparse
import asyncio
import gc
import logging
import secrets
import sys
from pathlib import Path

from atoll.config.errors import ConfigError
from atoll.config.load import OPERATOR_TOKEN, access_token, optional_token, read_resolved
from atoll.config.schema import RunConfig
from atoll.coordinator.assembly import Assembly
from atoll.coordinator.background import first_cause
from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.fleet.scaling import Scaling
from atoll.coordinator.gauges import RunCollector
from atoll.coordinator.rewards.registration import RegistrationRules
from atoll.coordinator.rewards.servers import Servers
from atoll.coordinator.service import OPERATORS_MAY, CoordinatorService
from atoll.external.addresses import AddressPolicy, is_loopback
from atoll.external.protocols import connect
from atoll.runtime.clients.base import Caller
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.process import GARBAGE, announce
from atoll.runtime.prometheus import ProcessMetrics
from atoll.runtime.server import Server, TokenGrant
from atoll.runtime.store import Store
from atoll.runtime.telemetry import configure_logging

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


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
        asyncio.run(
            run(read_resolved(arguments.config), arguments.store, arguments.ready_fd, arguments.resume)
        )
    except (ConfigError, UserError) as error:
        sys.exit(f"coordinator: {error}")
    except (AtollError, OSError) as error:
        log.exception("the run failed")
        sys.exit(f"coordinator: {error}")


async def run(config: RunConfig, store_url: str, ready_fd: int | None, resume: bool) -> None:
    """Serves until the run has ended. Raises the error that ended it, if any."""
    token, operator_token = access_token(), optional_token(OPERATOR_TOKEN)
    store = Store(store_url, config.run.name)
    await store.claim(run_id(config.folder))
    caller = Caller(await store.take_epoch(), token)
    registry = Registry(
        store.new_connection(), config.coordinator.lease_s
    )  # heartbeats must not wait for the journal
    control = RunControl(
        trains=config.run.mode != "rollout_only",
        scaling=Scaling.of(config, has_launcher=ready_fd is not None),
    )
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
    try:
        if ready_fd is not None:
            announce(ready_fd, server.address, metrics.address)
        await Assembly(config, store, registry, servers, control, caller).run(resume)
        if ready_fd is None:  # a launcher stops services itself
            await registry.dismiss()
    except BaseException as error:
        cause = first_cause(error)
        await control.report(state=RunState.FAILED, error=str(cause))
        raise cause from error
    finally:
        await server.stop(STOP_GRACE_S)
        await servers.close()
        await store.close()


def run_id(folder: Path) -> str:
    """Identifies the run in this folder among runs of the same name in a shared store."""
    path = folder / "run.id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".partial")
        new.write_text(secrets.token_hex(8))
        new.rename(path)
    return path.read_text()


if __name__ == "__main__":
    main()
