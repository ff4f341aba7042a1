"""The store against the real server: fencing, lost connections, SIGKILL on either side."""

import asyncio
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.coordinator.__main__ import run
from atoll.coordinator.journal.run_folder import run_id
from atoll.runtime.errors import StaleFenceError, StoreError, UserError
from atoll.runtime.ports import reserve_port
from atoll.runtime.store import EmbeddedServer, Script, Store, run_embedded_server
from tests.builders import run_config

PUT = Script("return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])")


async def test_a_write_finds_its_keys_and_arguments_behind_the_fence(store: Store) -> None:
    echo = Script("return {KEYS[1], KEYS[2], #KEYS, ARGV[1], #ARGV}")
    run = "test_a_write_finds_its_keys_and_arguments_behind_the_fence"
    expected = [f"atoll/{run}/a".encode(), f"atoll/{run}/b".encode(), 2, b"\x00\xff", 1]
    assert await store.write(echo, ["a", "b"], b"\x00\xff") == expected


async def test_a_store_started_by_hand_admits_those_with_the_token(tmp_path: Path) -> None:
    with reserve_port() as port:
        process = await asyncio.create_subprocess_exec(
            *(Path(sys.executable).with_name("atoll"), "serve", "store"),
            *("--folder", tmp_path, "--port", str(port)),
            env=os.environ | {"ATOLL_TOKEN": "the-secret"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
            assert line == f"store: redis://:$ATOLL_TOKEN@127.0.0.1:{port}/0\n"
            store = Store(f"redis://:the-secret@127.0.0.1:{port}/0", "toy")
            await store.take_epoch()
            await store.write(PUT, ["h"], "who", "first")
            assert await store.read("HGET", "h", "who") == b"first"
            await store.close()
            for url in (f"redis://127.0.0.1:{port}/0", f"redis://:other@127.0.0.1:{port}/0"):
                stranger = Store(url, "toy")
                with pytest.raises((UserError, StoreError), match="refused"):
                    await stranger.read("HGET", "h", "who")
                await stranger.close()
            [server] = psutil.Process(process.pid).children()
            assert "the-secret" not in " ".join(server.cmdline())
        finally:
            process.terminate()
            await process.wait()
    assert process.returncode == 0


async def test_a_store_started_by_hand_keeps_its_data_over_sigterm(tmp_path: Path) -> None:
    """On every address of the machine, as in a container."""
    command = (
        Path(sys.executable).with_name("atoll"),
        "serve",
        "store",
        "--folder",
        tmp_path / "new" / "store",
    )
    with reserve_port() as port:
        for expected in (None, b"first"):
            process = await asyncio.create_subprocess_exec(
                *(*command, "--host", "0.0.0.0", "--port", str(port)),
                env=os.environ | {"ATOLL_TOKEN": "the-secret"},
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), 30)
            store = Store(f"redis://:the-secret@127.0.0.1:{port}/0", "toy")
            await store.take_epoch()
            assert await store.read("HGET", "h", "who") == expected
            await store.write(PUT, ["h"], "who", "first")
            await store.close()
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_an_earlier_writer_is_refused_and_changes_nothing(
    store_server: EmbeddedServer, store: Store
) -> None:
    await store.write(PUT, ["h"], "who", "first")
    second = Store(store_server.url, "test_an_earlier_writer_is_refused_and_changes_nothing")
    assert await second.take_epoch() > store.epoch
    with pytest.raises(StaleFenceError, match=f"seen epoch {second.epoch}, this caller has {store.epoch}"):
        await store.write(PUT, ["h"], "who", "ghost")
    assert await second.read("HGET", "h", "who") == b"first"
    await second.write(PUT, ["h"], "who", "second")
    assert await second.read("HGET", "h", "who") == b"second"
    await second.close()


async def test_epochs_rise_even_where_the_store_was_wiped(store: Store) -> None:
    before = store.epoch
    await store.write(Script("redis.call('DEL', KEYS[1])"), ["fence"])
    assert await store.take_epoch() >= before
    assert await store.take_epoch() > before


async def test_a_cancelled_call_leaves_no_answer_for_the_next(tmp_path: Path) -> None:
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "r")
        await store.take_epoch()
        os.kill(server.process.pid, signal.SIGSTOP)  # the answer cannot come before the caller is gone
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.write(Script("return 'theirs'"), []), 0.2)
        os.kill(server.process.pid, signal.SIGCONT)
        assert await store.write(Script("return 'mine'"), []) == b"mine"
        await store.close()


async def test_concurrent_calls_get_their_own_answers(store: Store) -> None:
    echo = Script("return ARGV[1]")
    answers = await asyncio.gather(*(store.write(echo, [], str(i)) for i in range(100)))
    assert answers == [str(i).encode() for i in range(100)]


async def test_a_connection_apart_does_not_wait_for_a_long_call(store: Store) -> None:
    long_call = asyncio.create_task(store.read("BLPOP", "list", 60))
    apart = store.new_connection()
    async with asyncio.timeout(30):
        await apart.write(Script("redis.call('RPUSH', KEYS[1], 'done')"), ["list"])
        assert (await long_call)[1] == b"done"


async def test_a_run_of_the_same_name_in_another_folder_is_refused_before_it_ends_the_first(
    store_server: EmbeddedServer, store: Store, request: pytest.FixtureRequest
) -> None:
    await store.claim("4b1d")
    await store.claim("4b1d")  # when it resumes
    other = Store(store_server.url, request.node.name)
    with pytest.raises(UserError, match=r"another run of this name \(id 4b1d, this one has 77aa\): choose"):
        await other.claim("77aa")
    await store.write(PUT, ["h"], "who", "first")
    await other.close()


async def test_a_coordinator_of_another_folder_leaves_a_living_run_of_its_name_alone(
    store_server: EmbeddedServer, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    settings = {"run": {"name": request.node.name[:40], "dir": tmp_path}}
    named = Store(store_server.url, request.node.name[:40])
    await named.claim("4b1d")
    await named.take_epoch()
    config = run_config(settings, reward={"graders": [{"name": "exact_match"}]})
    with pytest.raises(UserError, match=r"holds another run of this name \(id 4b1d, "):
        await run(config, store_server.url, None, resume=False)
    await named.write(PUT, ["h"], "who", "first")  # under its epoch still
    await named.close()


def test_a_folder_keeps_the_id_of_its_run(tmp_path: Path) -> None:
    ids = {name: run_id(tmp_path / name) for name in ("a", "b")}
    assert ids["a"] != ids["b"]
    assert {name: run_id(tmp_path / name) for name in ids} == ids


async def test_what_was_answered_survives_sigkill_of_the_server(tmp_path: Path) -> None:
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "r")
        epoch = await store.take_epoch()
        for i in range(1000):
            await store.write(PUT, ["h"], str(i), str(i * i))
        server.process.kill()
        server.process.wait()
        with pytest.raises(StoreError, match=r"unix:///.*is it running, and is store\.url correct"):
            await store.read("HLEN", "h")
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "r")
        assert await store.take_epoch() > epoch
        assert await store.read("HLEN", "h") == 1000
        assert await store.read("HGET", "h", "999") == b"998001"
        await store.close()


async def test_the_next_call_connects_again_and_brings_its_script(tmp_path: Path) -> None:
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "r")
        await store.take_epoch()
        await store.write(PUT, ["h"], "a", "1")
        other = Store(server.url, "r")
        await other._call("SCRIPT", "FLUSH")
        await other._call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(StoreError):
            await store.write(PUT, ["h"], "b", "2")
        await store.write(PUT, ["h"], "c", "3")
        assert await store.read("HGET", "h", "c") == b"3"
        await store.close()
        await other.close()


def test_the_server_dies_with_its_parent_and_frees_the_folder(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from atoll.runtime.store import run_embedded_server\n"
        f"with run_embedded_server(Path({str(tmp_path)!r})) as server:\n"
        "    print(server.process.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    server.wait(timeout=10)  # raises if it outlives its parent
    with run_embedded_server(tmp_path):
        pass


def test_two_servers_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.runtime.store.LOCK_TIMEOUT_S", 0.1)
    with (
        run_embedded_server(tmp_path),
        pytest.raises(UserError, match=r"in use by another.*choose another run\.name"),
        run_embedded_server(tmp_path),
    ):
        pass


def test_leaving_removes_process_and_socket(tmp_path: Path) -> None:
    with run_embedded_server(tmp_path) as server:
        socket = Path(server.url.removeprefix("unix://"))
        assert socket.is_socket()
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert (tmp_path / "socket").is_socket()
    assert server.process.returncode == 0
    assert not (tmp_path / "socket").exists()


def test_a_folder_deeper_than_a_socket_path_may_be(tmp_path: Path) -> None:
    with run_embedded_server(tmp_path / ("long" * 40)) as server:
        assert server.process.poll() is None


async def test_an_unreachable_store_fails_in_time_and_hides_the_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    store = Store("redis://user:pa55word@127.0.0.1:1/0", "r")
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"redis://127\.0\.0\.1:1/0") as caught:
        await store.take_epoch()
    assert time.monotonic() - start < 5
    assert "pa55word" not in str(caught.value) + caplog.text
    for url in ("http://user:pa55word@host:1", "redis://:pa55word#pa55word@host:1"):
        with pytest.raises(UserError, match=r"store\.url") as refused:
            Store(url, "r")
        assert "pa55word" not in str(refused.value)


async def test_a_hung_server_fails_the_call_at_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "r")
        await store.take_epoch()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as hurried:
                hurried.setattr("atoll.runtime.store.TIMEOUT_S", 0.3)
                with pytest.raises(StoreError, match=r"no answer within 0\.3 s"):
                    await store.read("HLEN", "h")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert await store.read("HLEN", "h") == 0
        await store.close()
