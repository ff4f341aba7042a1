"""The trainer fleet as its own processes over gRPC: calls, retries, checkpoints, deaths."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from atoll.config.schema import ParallelConfig
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import DamagedCheckpointError, LostStateError, ServiceUnavailableError, UserError
from atoll.runtime.process import EXIT_RANK_LOST
from atoll.wire.types import PublishRequest, Segments, ValueBatch, Version
from tests.tokens import CALLER
from tests.trainer_fleet import TEMPERATURE, batch, fleet, key, update

END_S = 20.0


async def drive(address: str, folder: Path) -> list[float]:
    """Every call of the service, with what must hold between them; returns logprobs after one update."""
    client = TrainerClient(address, CALLER, timeout_s=60)
    try:
        info = await client.info()
        assert info.vocab_size == 64
        assert len(info.shard_layouts) == info.world_size
        assert (
            len(set(map(id, info.shard_layouts))) == info.world_size // info.data_parallel
        )  # copies travel once
        assert info.roles == ("actor", "reference")

        segments = batch(0).segments
        done = await client.progress()
        before = await client.compute_logprobs(segments)
        done, earlier = await client.progress(), done
        assert done > earlier
        reference = TrainerClient(address, CALLER, timeout_s=60, role="reference")
        np.testing.assert_array_equal(await reference.compute_logprobs(segments), before)
        first, again = await asyncio.gather(
            client.forward_backward(key(0), batch(0)), client.forward_backward(key(0), batch(0))
        )
        assert first == again
        assert first["actor/ratio"] == 1
        stepped = await client.optim_step(key(0), 1e-2)
        assert await client.optim_step(key(0), 1e-2) == stepped
        after = await client.compute_logprobs(segments)
        assert np.abs(after - before).max() > 1e-3
        assert await client.offload() > await reference.offload() > 0
        assert await client.offload() == await reference.offload() == 0
        np.testing.assert_array_equal(await reference.compute_logprobs(segments), before)
        with pytest.raises(UserError, match="the reference is not trained"):
            await reference.save_checkpoint(folder / "reference")
        with pytest.raises(LostStateError, match="no gradient"):
            await client.optim_step(key(5), 1e-2)

        saved = folder / "checkpoint"
        await client.save_checkpoint(saved)
        assert await client.offload() > 0
        expected = [await update(client, step) for step in (1, 2, 3)]  # while it is written
        written = await client.wait_checkpoint(saved)
        assert written.num_bytes == sum(f.stat().st_size for f in saved.iterdir())
        await client.load_checkpoint(saved)
        broken = batch(0)
        broken.advantages[3] = np.nan
        with pytest.raises(UserError, match="the batch's advantages hold NaN"):
            await client.forward_backward(key(9), broken)
        # what it refused leaves no trace in what it learns from others
        assert [await update(client, step) for step in (1, 2, 3)] == expected
        await client.save_checkpoint(saved)  # a repeated save takes the old one's place
        assert (await client.wait_checkpoint(saved)).num_bytes == written.num_bytes
        with pytest.raises(LostStateError, match="nothing is being written to"):
            await client.wait_checkpoint(folder / "other")

        with pytest.raises(DamagedCheckpointError, match="is not a trainer checkpoint"):
            await client.load_checkpoint(folder / "export")
        damaged = shutil.copytree(saved, folder / "damaged")
        os.truncate(next(damaged.glob("*.distcp")), written.num_bytes // 2)
        with pytest.raises(DamagedCheckpointError, match="damaged is damaged: EOFError"):
            await client.load_checkpoint(damaged)
        await client.load_checkpoint(saved)
        outside = folder.with_name(f"{folder.name}-outside")
        outside.mkdir()
        (outside / "thesis.tex").touch()
        for call in (client.save_checkpoint, client.load_checkpoint, client.export_hf, client.load_hf):
            for path in (outside, folder):
                with pytest.raises(UserError, match="expected one below the run's folder"):
                    await call(path)
        assert (outside / "thesis.tex").exists()
        wrong = batch(0)
        wrong.segments.token_ids[3] = 64
        with pytest.raises(UserError, match="outside the model's vocabulary"):
            await client.forward_backward(key(6), wrong)
        with pytest.raises(UserError, match="holds actor and reference, not 'critic'"):
            await TrainerClient(address, CALLER, role="critic").info()

        assert await client.offload() > 0
        done = await client.progress()
        await client.export_hf(folder / "export")
        assert await client.progress() > done
        with pytest.raises(UserError, match="is not empty"):
            await client.export_hf(folder / "export")
        await reference.load_hf(folder / "export")
        exported = await client.compute_logprobs(segments)
        np.testing.assert_array_equal(await reference.compute_logprobs(segments), exported)
        await reference.close()
        await client.load_checkpoint(saved)  # of the state after three updates
        return (await client.compute_logprobs(segments)).tolist()
    finally:
        await client.close()


def logprobs_by_transformers(model_folder: Path, segments: Segments, temperature: float) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected = np.zeros(len(segments.token_ids))
    for s, parent in enumerate(segments.parents):
        own = np.arange(segments.offsets[s], segments.offsets[s + 1])
        before = np.arange(segments.offsets[parent], segments.offsets[parent + 1]) if parent >= 0 else own[:0]
        ids = torch.from_numpy(segments.token_ids[np.concatenate([before, own])]).long()
        with torch.no_grad():
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
        for i, token in enumerate(own.tolist(), len(before)):
            if i > 0:
                expected[token] = table[i - 1, ids[i]].item()
    return expected


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_fleet_serves_every_call(tmp_path: Path, tiny_qwen2: Path, data: int) -> None:
    tables = {"algorithm": {"kl": {"where": "reward"}}, "reference": {"placement": "colocated"}}
    with fleet(tmp_path, tiny_qwen2, ParallelConfig(data=data), **tables) as running:
        logprobs = asyncio.run(drive(running.address, tmp_path))
        expected = logprobs_by_transformers(tmp_path / "export", batch(0).segments, TEMPERATURE)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
        running.ranks[0].send_signal(signal.SIGTERM)
        assert [process.wait(END_S) for process in running.ranks] == [0] * data


async def drive_critic(address: str, folder: Path) -> None:
    """Every call that a critic answers, and those that it refuses."""
    client = TrainerClient(address, CALLER, timeout_s=60, role="critic")
    try:
        info = await client.info()
        assert info.roles == ("critic",)
        segments, weights = batch(0).segments, batch(0).loss_weights
        # a head of 0 says 0; returns of 1: the loss is 18 tokens * 1/18 * 0.5 * (0 - 1)^2
        np.testing.assert_array_equal(await client.compute_values(segments), 0)
        ones = np.ones_like(weights)
        metrics = await client.forward_backward(
            key(0, "critic"), ValueBatch(segments, weights, 0 * ones, ones)
        )
        assert metrics["critic/vf_loss"] == pytest.approx(0.5, abs=1e-6)
        assert (await client.optim_step(key(0, "critic"), 1e-2))["critic/skipped_step"] == 0
        after = await client.compute_values(segments)
        assert after[weights > 0].mean() > 0.01
        await client.save_checkpoint(folder / "checkpoint")
        await client.load_checkpoint(folder / "checkpoint")  # waits until it is written
        np.testing.assert_array_equal(await client.compute_values(segments), after)

        with pytest.raises(UserError, match="the critic is not published"):
            await client.publish_weights(PublishRequest(Version("a3f0", 1), "float32", {}, [], 0))
        with pytest.raises(UserError, match="a value model has no log-probabilities"):
            await client.compute_logprobs(segments)
        with pytest.raises(UserError, match="the critic learns from ValueBatch, got PolicyBatch"):
            await client.forward_backward(key(1, "critic"), batch(0))
        with pytest.raises(UserError, match="has made 1 updates"):
            await client.load_hf(folder / "any")
    finally:
        await client.close()


def test_a_critic_answers_values_and_refuses_to_publish(tmp_path: Path, tiny_qwen2: Path) -> None:
    """The assertions are in drive_critic."""
    algorithm = {"advantage": "gae"}
    with fleet(tmp_path, tiny_qwen2, ParallelConfig(tensor=2), "critic", algorithm=algorithm) as running:
        asyncio.run(drive_critic(running.address, tmp_path))


@pytest.mark.long
def test_a_dead_follower_is_an_error_and_ends_the_leader(tmp_path: Path, tiny_qwen2: Path) -> None:
    with fleet(tmp_path, tiny_qwen2, ParallelConfig(data=2)) as running:

        async def call_after_death() -> None:
            client = TrainerClient(running.address, CALLER, timeout_s=60)
            await update(client, 0)
            running.ranks[1].kill()
            running.ranks[1].wait()
            with pytest.raises(ServiceUnavailableError):
                await client.forward_backward(key(1), batch(1))
            await client.close()

        asyncio.run(call_after_death())
        assert running.ranks[0].wait(END_S) == EXIT_RANK_LOST
        log = running.logs[0].read_text()
        assert "restart it from a checkpoint" in log
        assert "another rank of this trainer exited" in log
