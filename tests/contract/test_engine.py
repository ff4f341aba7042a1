"""What every engine behind services/rollout/engines/base.py must do, measured against transformers.

All tests of one engine share one that is started, and find it with the weights that the last one left live.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from atoll.rollout.engines.base import Completion
from atoll.rollout.engines.local import LocalEngine
from atoll.runtime.errors import UserError, WeightPushError
from atoll.wire.types import FinishReason, PauseMode, Sampling, TurnRequest, Version, VersionSpan
from tests.contract.engines import (
    ENDLESS,
    GREEDY,
    KINDS,
    PROMPTS,
    Live,
    ask,
    collect,
    continued,
    logprobs_of,
    one,
    reference_greedy,
    start_live,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Live]:
    folder = request.getfixturevalue("tiny_qwen3")
    live = await start_live(request.param, folder, tmp_path_factory.mktemp("other"))
    yield live
    await live.close()


async def test_an_engine_describes_itself(live: Live) -> None:
    info = live.engine.info()
    assert (info.vocab_size, info.dtype, info.running, info.queued) == (64, "float32", 0, 0)
    assert info.slots >= 1
    await one(live.engine, ask(PROMPTS[0]))
    assert live.engine.info().tokens_generated - info.tokens_generated == 24


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 10, 1.0), (1.0, 0, 0.7), (0.7, 0, 0.9), (1.0, 1, 1.0)],
)
async def test_logprobs_are_those_of_the_sampling_distribution(
    live: Live, temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(20, temperature, top_p, top_k)
    requests = [ask(prompt, sampling, row=row, indices=range(4)) for row, prompt in enumerate(PROMPTS)]
    for (row, _), completion in (await collect(live.engine, requests)).items():
        expected = logprobs_of(live.folder, PROMPTS[row], completion.token_ids, temperature, top_k, top_p)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_samples_of_a_group_differ_and_start_from_the_same_prompt(live: Live) -> None:
    done = await collect(live.engine, [ask(PROMPTS[2], Sampling(12), indices=range(12))])
    assert len({tuple(c.token_ids) for c in done.values()}) == 12
    greedy = await collect(live.engine, [ask(PROMPTS[2], indices=range(12))])
    expected = reference_greedy(live.folder, PROMPTS[2], 24)
    assert [c.token_ids.tolist() for c in greedy.values()] == [expected] * 12


async def test_settings_of_a_neighbour_change_nothing(live: Live) -> None:
    done = await collect(
        live.engine,
        [
            ask(PROMPTS[0]),
            ask(PROMPTS[1], Sampling(40), row=1),
            ask(PROMPTS[2], Sampling(9, temperature=0.5, top_k=3), row=2),
            ask(PROMPTS[3], Sampling(30, top_p=0.5, stop=("zz",), stop_token_ids=(1, 2, 3)), row=3),
        ],
    )
    assert done[0, 0].token_ids.tolist() == reference_greedy(live.folder, PROMPTS[0], 24)
    expected = logprobs_of(live.folder, PROMPTS[0], done[0, 0].token_ids)
    np.testing.assert_allclose(done[0, 0].logprobs, expected, atol=1e-4)


async def test_stop_token_ends_the_response_and_belongs_to_it(live: Live) -> None:
    full = await one(live.engine, ask(PROMPTS[0]))
    stop = int(full.token_ids[4])
    end = full.token_ids.tolist().index(stop) + 1
    cut = await one(live.engine, ask(PROMPTS[0], replace(GREEDY, stop_token_ids=(63, stop)), row=1))
    assert cut.token_ids.tolist() == full.token_ids[:end].tolist()
    assert cut.finish_reason is FinishReason.STOP
    assert full.finish_reason is FinishReason.LENGTH
    assert full.text.startswith(cut.text)
    assert len(cut.text) < len(full.text)


async def test_stop_string_ends_the_response_and_is_not_in_the_text(live: Live) -> None:
    """The tokenizer has one token per character, so a stop of three characters spans three tokens."""
    full = await one(live.engine, ask(PROMPTS[0]))
    stop = full.text[6:9]
    at = full.text.find(stop)
    cut = await one(live.engine, ask(PROMPTS[0], replace(GREEDY, stop=("\n\n", stop)), row=1))
    assert cut.text == full.text[:at]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < 24
    assert cut.token_ids.tolist() == full.token_ids[: len(cut.token_ids)].tolist()


async def test_response_ends_where_the_model_does(live: Live) -> None:
    prompt = [3 + i % 40 for i in range(live.engine.info().max_length - 8)]
    completion = await one(live.engine, ask(prompt, Sampling(100, temperature=0.0)))
    assert completion.token_ids.tolist() == reference_greedy(live.folder, prompt, 8)
    assert completion.finish_reason is FinishReason.LENGTH


async def test_progress_shows_while_tokens_are_produced(live: Live) -> None:
    before = await live.engine.progress()
    await one(live.engine, ask(PROMPTS[0], GREEDY))
    assert await live.engine.progress() != before


async def test_abort_returns_what_was_produced(live: Live) -> None:
    endless = replace(GREEDY, max_new_tokens=ENDLESS)
    requests = [
        ask(PROMPTS[0], endless, row=10),
        ask(PROMPTS[0], endless, row=11, indices=(0, 1)),
        ask(PROMPTS[3], replace(GREEDY, max_new_tokens=live.long), row=2),
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=30), row=1),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        assert [c.id.sample.group.prompt for c in await anext(stream)] == [1]  # so the others run
        assert await live.engine.abort("toy/0/1") == 3
        done = {
            (c.id.sample.group.prompt, c.id.sample.index): c
            async for completions in stream
            for c in completions
        }
    untouched = done.pop((2, 0))
    assert untouched.token_ids.tolist() == reference_greedy(live.folder, PROMPTS[3], live.long)
    assert sorted(done) == [(10, 0), (11, 0), (11, 1)]
    for partial in done.values():
        assert_partial(live, PROMPTS[0], partial)
    assert await live.engine.abort("") == 0


def assert_partial(live: Live, prompt: list[int], partial: Completion) -> None:
    produced = len(partial.token_ids)
    assert partial.finish_reason is FinishReason.ABORT
    assert 0 < produced == len(partial.logprobs) < ENDLESS
    assert partial.spans == (VersionSpan(live.version, 0, produced),)
    assert partial.token_ids.tolist() == reference_greedy(live.folder, prompt, produced)


async def test_pause_wait_finishes_what_runs_and_holds_the_rest(live: Live) -> None:
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=1), row=1),
        *(ask(PROMPTS[0], replace(GREEDY, max_new_tokens=40), row=row) for row in (2, 3)),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        done = await anext(stream)
        await live.engine.pause(PauseMode.WAIT)
        await live.engine.pause(PauseMode.WAIT)
        assert (live.engine.info().running, live.engine.info().queued) == (0, 0)
        done += [c async for completions in stream for c in completions]
    assert sorted(c.id.sample.group.prompt for c in done) == [1, 2, 3]
    assert {c.finish_reason for c in done} == {FinishReason.LENGTH}
    await assert_held_until_resume(live)


async def assert_held_until_resume(live: Live) -> None:
    """What comes is begun with the weights that came after it."""
    held = asyncio.create_task(one(live.engine, ask(PROMPTS[2], row=9)))
    await until_queued(live)
    await live.push()
    assert not held.done()
    await live.engine.resume()
    completion = await held
    assert completion.token_ids.tolist() == reference_greedy(live.folder, PROMPTS[2], 24)
    assert completion.spans == (VersionSpan(live.version, 0, 24),)


async def until_queued(live: Live) -> None:
    async with asyncio.timeout(60):
        while live.engine.info().queued == 0:  # noqa: ASYNC110 - an engine has no event for it
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "modes",
    [
        [PauseMode.IN_PLACE],
        [PauseMode.RETRACT],
        [PauseMode.IN_PLACE, PauseMode.IN_PLACE, PauseMode.RETRACT],
        [PauseMode.RETRACT, PauseMode.IN_PLACE],
    ],
)
async def test_a_pause_keeps_the_sequences(live: Live, modes: list[PauseMode]) -> None:
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=3), row=1),
        ask(PROMPTS[0], replace(GREEDY, max_new_tokens=live.long), row=2),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        await anext(stream)
        for mode in modes:
            await live.engine.pause(mode)
        # other weights, and the first ones again: an engine at work would produce tokens in between
        before = live.version
        await live.push()
        await live.push()
        await live.engine.resume()
        await live.engine.resume()
        (completion,) = await anext(stream)
    assert completion.token_ids.tolist() == reference_greedy(live.folder, PROMPTS[0], live.long)
    paused = completion.spans[0].end
    assert completion.spans == (
        VersionSpan(before, 0, paused),
        VersionSpan(live.version, paused, live.long),
    )
    expected = logprobs_of(live.folder, PROMPTS[0], completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("first", [None, PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_pause_abort_ends_what_is_there_and_holds_what_comes(
    live: Live, first: PauseMode | None
) -> None:
    requests = [
        ask(PROMPTS[0], replace(GREEDY, max_new_tokens=ENDLESS), row=2, indices=(0, 1)),
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=30), row=1),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        await anext(stream)
        if first is not None:
            await live.engine.pause(first)
        await live.engine.pause(PauseMode.ABORT)
        done = [c async for completions in stream for c in completions]
    assert [c.finish_reason for c in done] == [FinishReason.ABORT] * 2
    for partial in done:
        # what SGLang took back and has not taken up again comes without its tokens
        may_be_empty = first is PauseMode.RETRACT and not isinstance(live.engine, LocalEngine)
        if len(partial.token_ids) or not may_be_empty:
            assert_partial(live, PROMPTS[0], partial)
    assert (live.engine.info().running, live.engine.info().queued) == (0, 0)
    held = asyncio.create_task(one(live.engine, ask(PROMPTS[2], row=8)))
    await until_queued(live)
    await live.engine.pause(PauseMode.ABORT)  # if repeated, newer requests are spared
    await assert_held_until_resume(live)
    assert (await held).token_ids.tolist() == reference_greedy(live.folder, PROMPTS[2], 24)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(ENDLESS, top_k=5)])
async def test_what_was_retracted_can_be_aborted(live: Live, sampling: Sampling) -> None:
    requests = [
        ask(PROMPTS[0], replace(sampling, max_new_tokens=ENDLESS), row=2, indices=(0, 1)),
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=60), row=1),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        await anext(stream)
        await live.engine.pause(PauseMode.RETRACT)
        assert await live.engine.abort("") == 2
        done = [c async for completions in stream for c in completions]
    assert [c.finish_reason for c in done] == [FinishReason.ABORT] * 2
    for partial in done:  # SGLang does not return all of the tokens that it took back
        assert bool(len(partial.token_ids)) == isinstance(live.engine, LocalEngine)
        assert len(partial.logprobs) == len(partial.token_ids)
    await live.engine.resume()
    assert (await one(live.engine, ask(PROMPTS[2], row=8))).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("pause", [None, PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_weights_change_while_sequences_run(live: Live, pause: PauseMode | None) -> None:
    old_version, old = live.version, live.folder
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=5), row=1),
        ask(PROMPTS[0], replace(GREEDY, max_new_tokens=live.long), row=2),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        version = await live.stage()
        assert live.engine.version == old_version
        await anext(stream)
        if pause is not None:
            await live.engine.pause(pause)
        assert 0 <= await live.commit(version) < 5
        if pause is not None:
            await live.engine.resume()
        assert live.engine.version == version
        ((crossed,),) = [completions async for completions in stream]
    (before, after) = crossed.spans
    assert (before.version, before.start, after.version, after.end) == (old_version, 0, version, live.long)
    assert 0 < before.end == after.start < live.long
    tokens = crossed.token_ids.tolist()
    assert tokens[: before.end] == reference_greedy(old, PROMPTS[0], before.end)
    if pause is PauseMode.RETRACT:  # keys and values of all tokens are the new weights'
        prompt = [*PROMPTS[0], *tokens[: before.end]]
        assert tokens[before.end :] == reference_greedy(live.folder, prompt, live.long - before.end)
        expected = logprobs_of(live.folder, prompt, tokens[before.end :])
        np.testing.assert_allclose(crossed.logprobs[before.end :], expected, atol=1e-4)
    else:
        assert tokens == continued(old, live.folder, PROMPTS[0], tokens, before.end)


async def test_a_prompt_seen_before_is_read_with_the_new_weights(live: Live) -> None:
    prompt = [3 + i % 40 for i in range(200)]
    ids = np.array(prompt, np.int32)
    for _ in range(2):
        completion = await one(live.engine, ask(prompt))
        expected = logprobs_of(live.folder, prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        (scored,) = await live.engine.score_tokens([ids])
        np.testing.assert_allclose(scored, logprobs_of(live.folder, ids[:1], ids[1:]), atol=1e-4)
        await live.push()


async def test_rolled_back_weights_never_live(live: Live) -> None:
    before = await live.engine.checksums()
    version = await live.stage()
    await live.engine.rollback(version)
    assert await live.engine.checksums() == before
    with pytest.raises(WeightPushError, match="nothing is staged"):
        await live.engine.commit(version)
    assert (await one(live.engine, ask(PROMPTS[0]))).spans == (VersionSpan(live.version, 0, 24),)
    await live.push()
    assert (await live.engine.checksums())[0] == live.version == Version(version.lineage, version.number)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([3, 64]), "token id 64, expected 0 to 63"),
        (ask([-1, 3]), "token id -1"),
        (ask([]), "has 0 tokens"),
        (ask([3] * 4096), r"has 4096 tokens, expected 1 to \d+"),
        (ask([3], Sampling(0)), "max_new_tokens"),
        (ask([3], Sampling(1, top_p=0.0)), "top_p"),
        (ask([3], Sampling(1, temperature=float("nan"))), "temperature"),
        (ask([3], Sampling(1, temperature=1e-40)), "temperature"),
        (ask([3], Sampling(1, stop=("",))), "stop"),
    ],
)
async def test_bad_requests_are_refused_and_harm_nobody(
    live: Live, request_: TurnRequest, message: str
) -> None:
    running = asyncio.create_task(one(live.engine, ask(PROMPTS[0], row=5)))
    with pytest.raises(UserError, match=message):
        await collect(live.engine, [ask(PROMPTS[1], row=6), request_])
    assert (await running).token_ids.tolist() == reference_greedy(live.folder, PROMPTS[0], 24)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([3, 64], "token id 64"), ([-1], "token id -1"), ([], "has 0 tokens"), ([3] * 5000, "has 5000 tokens")],
)
async def test_what_cannot_be_scored_is_refused(live: Live, ids: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        await live.engine.score_tokens([np.array([5, 6], np.int32), np.array(ids, np.int32)])


async def test_scores_come_while_others_generate(live: Live) -> None:
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=3), row=1),
        ask(PROMPTS[0], replace(GREEDY, max_new_tokens=live.long), row=2),
    ]
    async with asyncio.timeout(60), aclosing(live.engine.generate(requests)) as stream:
        await anext(stream)
        (scored,) = await live.engine.score_tokens([np.array(PROMPTS[2], np.int32)])
        (completion,) = await anext(stream)
    expected = logprobs_of(live.folder, PROMPTS[2][:1], PROMPTS[2][1:])
    np.testing.assert_allclose(scored, expected, atol=1e-4)
    assert completion.token_ids.tolist() == reference_greedy(live.folder, PROMPTS[0], live.long)


async def test_a_call_that_ends_early_leaves_nothing_running(live: Live) -> None:
    endless = [ask(PROMPTS[0], Sampling(ENDLESS), row=row, indices=range(4)) for row in range(5)]

    async def drain() -> None:
        async with asyncio.timeout(0.05), aclosing(live.engine.generate(endless)) as stream:
            async for _ in stream:
                pass

    with pytest.raises(TimeoutError):
        await drain()
    assert await live.engine.abort("") == 0
    assert (live.engine.info().running, live.engine.info().queued) == (0, 0)
