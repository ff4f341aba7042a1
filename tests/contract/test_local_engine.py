"""What the local engine alone promises: draws that depend on seed and position alone, however samples are
batched, retracted or asked for again, and slots that are filled at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from atoll.rollout.engines.base import Engine
from atoll.runtime.errors import EngineDiedError, ServiceUnavailableError, UserError, WeightPushError
from atoll.wire.types import EngineMemory, FinishReason, PauseMode, Sampling, Version
from tests.conftest import write_model
from tests.contract.engines import (
    ENDLESS,
    GREEDY,
    PROMPTS,
    FakeTrainer,
    ask,
    collect,
    logprobs_of,
    one,
    reference_greedy,
    reference_logits,
    sampling_logprobs,
    start_local,
)

StartEngine = Callable[..., Awaitable[Engine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    engines: list[Engine] = []

    async def start(folder: Path, **settings: object) -> Engine:
        engines.append(await start_local(folder, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=1.4, top_p=0.8, top_k=30)])
async def test_frequencies_follow_the_distribution(start_engine, tiny_qwen2, sampling):
    count = 4000
    engine = await start_engine(tiny_qwen2, slots=64)
    done = await collect(engine, [ask(PROMPTS[0], sampling, indices=range(count))])
    observed = np.bincount([int(c.token_ids[0]) for c in done.values()], minlength=64)
    logits = reference_logits(tiny_qwen2, PROMPTS[0], [0])[0]
    expected = count * np.exp(sampling_logprobs(logits, sampling.temperature, sampling.top_k, sampling.top_p))
    assert (observed[expected == 0] == 0).all()
    often = expected >= 5
    chi_square = ((observed - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)  # its mean and five standard deviations


async def test_top_p_is_of_what_top_k_left(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=16)
    sampling = Sampling(20, temperature=0.8, top_p=0.9, top_k=20)
    requests = [ask(prompt, sampling, row=row, indices=range(4)) for row, prompt in enumerate(PROMPTS)]
    for (row, _), completion in (await collect(engine, requests)).items():
        expected = logprobs_of(tiny_qwen2, PROMPTS[row], completion.token_ids, 0.8, 20, 0.9)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_a_group_may_have_more_samples_than_there_are_slots(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=3)
    done = await collect(engine, [ask(PROMPTS[2], Sampling(12), indices=range(8))])
    assert len({tuple(c.token_ids) for c in done.values()}) == 8


async def test_responses_of_full_slots_end_at_max_length(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=30, max_length=20)
    done = await collect(engine, [ask(PROMPTS[2], Sampling(100, temperature=0.0), indices=range(30))])
    for completion in done.values():
        assert completion.token_ids.tolist() == reference_greedy(tiny_qwen2, PROMPTS[2], 8)
        assert completion.finish_reason is FinishReason.LENGTH


async def test_a_free_slot_is_used_at_once(start_engine, tiny_qwen2):
    """One long sample holds one of two slots; all short ones pass through the other meanwhile."""
    engine = await start_engine(tiny_qwen2, slots=2)
    requests = [ask(PROMPTS[0], Sampling(200, temperature=0.0), row=0)]
    requests += [ask(PROMPTS[1], replace(GREEDY, max_new_tokens=4), row=row) for row in range(1, 13)]
    assert [row for row, _ in await collect(engine, requests)] == [*range(1, 13), 0]


async def test_draws_do_not_depend_on_the_batch(start_engine, tiny_qwen2):
    """Nor on slots, order, lengths of the others, or the attempt; they do on seed and index."""
    sampling = Sampling(20, temperature=1.2, top_p=0.95, seed=5)
    requests = [
        ask(prompt, replace(sampling, max_new_tokens=5 + 5 * row), row=row, indices=range(5))
        for row, prompt in enumerate(PROMPTS)
    ]
    wide = await collect(await start_engine(tiny_qwen2, slots=20), requests)
    narrow = await start_engine(tiny_qwen2, slots=3)
    retried = [
        replace(request, ids=tuple(id._replace(attempt=3) for id in request.ids))
        for request in reversed(requests)
    ]
    for key, completion in (await collect(narrow, retried)).items():
        assert completion.token_ids.tolist() == wide[key].token_ids.tolist()
        assert completion.id.attempt == 3
    alone = await one(narrow, ask(PROMPTS[3], sampling, row=3, indices=[2]))
    assert alone.token_ids.tolist() == wide[3, 2].token_ids.tolist()
    reseeded = await one(narrow, ask(PROMPTS[3], replace(sampling, seed=6), row=3, indices=[2]))
    assert reseeded.token_ids.tolist() != wide[3, 2].token_ids.tolist()


async def test_retracted_samples_draw_what_they_would_have_drawn(start_engine, tiny_qwen3):
    """In fewer slots than they need, retracted again and again, with a stop token and a stop string."""
    sampling = Sampling(60, temperature=1.1, seed=7, stop_token_ids=(1,), stop=("zz", "+="))
    requests = [
        ask(PROMPTS[1], replace(sampling, max_new_tokens=2, stop_token_ids=(), stop=()), row=0),
        *(ask(prompt, sampling, row=row, indices=range(4)) for row, prompt in enumerate(PROMPTS, 1)),
    ]
    undisturbed = await collect(await start_engine(tiny_qwen3, slots=32), requests)
    engine = await start_engine(tiny_qwen3, slots=5)
    found, retractions = {}, 0
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        async for completions in stream:
            found |= {(c.id.sample.group.prompt, c.id.sample.index): c for c in completions}
            retractions += engine.info().running > 0
            await engine.pause(PauseMode.RETRACT)
            assert engine.info().running == 0
            await engine.resume()
    assert retractions >= 3
    assert found.keys() == undisturbed.keys()
    for key, completion in found.items():
        expected = undisturbed[key]
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
        assert (completion.text, completion.spans) == (expected.text, expected.spans)
        assert completion.finish_reason is expected.finish_reason


async def test_pauses_produce_no_token_and_an_abort_ends_what_waits_for_a_slot(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=2)
    endless = replace(GREEDY, max_new_tokens=ENDLESS)
    requests = [ask(PROMPTS[0], endless, row=row, indices=(0, 1)) for row in (1, 2)]
    requests.insert(0, ask(PROMPTS[1], replace(GREEDY, max_new_tokens=3)))
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        await anext(stream)
        for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            await engine.pause(mode)
            held = engine.info()
            assert held.running + held.queued == 4
            assert (held.running > 0) == (mode is PauseMode.IN_PLACE)
            await engine.checksums()  # whatever would still have decoded has had its turn
            assert engine.info().tokens_generated == held.tokens_generated
            await engine.resume()
        await engine.pause(PauseMode.ABORT)
        done = {
            (c.id.sample.group.prompt, c.id.sample.index): c
            async for completions in stream
            for c in completions
        }
    assert {c.finish_reason for c in done.values()} == {FinishReason.ABORT}
    assert len(done[1, 0].token_ids) > 0
    assert len(done[2, 0].token_ids) == len(done[2, 1].token_ids) == 0


async def test_bfloat16_follows_the_same_weights(start_engine, tiny_qwen2, tmp_path):
    """Against transformers in float32 with weights that were rounded to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.bfloat16).float()
    model.save_pretrained(tmp_path)
    engine = await start_engine(tiny_qwen2, dtype="bfloat16")
    assert engine.info().dtype == "bfloat16"
    done = await collect(
        engine, [ask(p, Sampling(24), row=i, indices=range(4)) for i, p in enumerate(PROMPTS)]
    )
    errors = [
        np.abs(completion.logprobs - logprobs_of(tmp_path, PROMPTS[row], completion.token_ids))
        for (row, _), completion in done.items()
    ]
    ids = np.array([3, *range(3, 60)], np.int32)
    (scored,) = await engine.score_tokens([ids])
    errors.append(np.abs(scored - logprobs_of(tmp_path, ids[:1], ids[1:])))
    assert np.mean(np.concatenate(errors)) < 0.02
    assert np.max(np.concatenate(errors)) < 0.2


async def test_who_comes_after_the_engine_broke_is_told(start_engine, diverged_qwen2):
    engine = await start_engine(diverged_qwen2)
    for _ in range(2):
        with pytest.raises(EngineDiedError, match="the engine failed: FloatingPointError"):
            async with asyncio.timeout(20):
                await one(engine, ask(PROMPTS[0], GREEDY))


async def test_released_memory_goes_back_to_the_system_until_a_push(start_engine, tmp_path):
    """Weights, keys and values of some 60 MB each. Requests are refused until both are back; then the engine
    generates as before, from the weights that it received last."""
    folder = write_model(
        tmp_path, "qwen2", vocab_size=60_000, hidden_size=256, num_key_value_heads=4, tie_word_embeddings=True
    )
    engine = await start_engine(folder, slots=16, takes_turns=True)
    trainer = FakeTrainer(folder, engine)
    prompt, process = PROMPTS[2] * 80, psutil.Process()
    asked = [ask(prompt, GREEDY, indices=range(16))]
    before = await collect(engine, asked)
    num_weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    cached = 2 * 2 * 4 * 64 * len(prompt) * 16  # keys and values of 2 layers and 4 heads
    held = process.memory_info().rss
    for _ in range(2):
        await engine.release()
    assert held - process.memory_info().rss > 0.9 * 4 * (num_weights + cached)

    version = Version("a3f0", 1)
    with pytest.raises(ServiceUnavailableError, match=r"released its memory \(CACHE and WEIGHTS\)"):
        await collect(engine, asked)
    with pytest.raises(ServiceUnavailableError, match="released its memory"):
        await engine.score_tokens([np.array(prompt, np.int32)])
    with pytest.raises(WeightPushError, match="restore it"):
        await trainer.stage(engine, folder, version)
    await engine.restore(EngineMemory.WEIGHTS)
    with pytest.raises(WeightPushError, match="before a version is committed"):
        await engine.restore(EngineMemory.CACHE)
    await trainer.stage(engine, folder, version)
    await engine.commit(version)
    with pytest.raises(ServiceUnavailableError, match=r"released its memory \(CACHE\)"):
        await collect(engine, asked)
    await engine.restore(EngineMemory.CACHE)
    after = await collect(engine, asked)
    assert {id: c.token_ids.tolist() for id, c in after.items()} == {
        id: c.token_ids.tolist() for id, c in before.items()
    }
    trainer.close()


async def test_an_engine_with_devices_of_its_own_keeps_its_memory(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2)
    with pytest.raises(UserError, match=r'placement\.mode = "colocated"'):
        await engine.release()
