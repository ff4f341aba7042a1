"""What depends on a model's architecture, for each engine and family: numbers, and where weights lie."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
import xxhash
from safetensors.torch import load_file

from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import GroupId, Prompt, Sampling, VersionSpan
from tests.contract.engines import (
    KINDS,
    PROMPTS,
    Live,
    ask,
    collect,
    logprobs_of,
    reference_greedy,
    reference_routes,
    start_live,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[(name, family) for name, kind in KINDS.items() for family in kind.families],
    ids="-".join,
)
async def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Live]:
    name, family = request.param
    live = await start_live(name, request.getfixturevalue(family), tmp_path_factory.mktemp("other"))
    yield live
    await live.close()


async def test_greedy_tokens_and_logprobs_equal_transformers(live: Live) -> None:
    requests = [ask(prompt, row=row) for row, prompt in enumerate(PROMPTS)]
    for (row, _), completion in (await collect(live.engine, requests)).items():
        assert completion.token_ids.tolist() == reference_greedy(live.folder, PROMPTS[row], 24)
        assert completion.spans == (VersionSpan(live.version, 0, 24),)
        expected = logprobs_of(live.folder, PROMPTS[row], completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


async def test_routes_equal_transformers(live: Live) -> None:
    """The first sample of a group records its prompt. The last token of a response is not computed."""
    spec = read_spec(live.folder)
    requests = [ask(ids, Sampling(8), row=row, indices=(0, 1)) for row, ids in enumerate(PROMPTS)]
    for (row, index), completion in (await collect(live.engine, requests)).items():
        if spec.experts is None:
            assert completion.routes is None
            continue
        ids = [*PROMPTS[row], *completion.token_ids]
        expected = reference_routes(live.folder, ids, spec.experts.per_token)[:-1]
        assert completion.routes is not None
        assert completion.routes.dtype == np.uint8
        routes = np.sort(completion.routes, -1)
        first = 0 if index == 0 else len(PROMPTS[row])
        drawn = max(first, len(PROMPTS[row]) - 1)  # before it, the last layer is of no use
        assert len(routes) == len(expected) - first
        np.testing.assert_array_equal(routes[:, :-1], expected[first:, :-1])
        np.testing.assert_array_equal(routes[drawn - first :, -1], expected[drawn:, -1])


async def test_scores_equal_transformers(live: Live) -> None:
    sequences = [np.array(ids, np.int32) for ids in (PROMPTS[2], [*PROMPTS[3], *range(3, 63)], PROMPTS[1])]
    scores = await live.engine.score_tokens(sequences)
    for ids, logprobs in zip(sequences, scores, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, logprobs_of(live.folder, ids[:1], ids[1:]), atol=1e-4)


async def test_a_group_with_a_greedy_member_has_its_greedy_tokens(live: Live) -> None:
    """As ReMax's dataflow asks: samples and baseline of each group in one call."""
    prompts = list(enumerate(PROMPTS))
    groups = [
        PendingGroup(
            Prompt(GroupId("toy", 0, row), np.array(prompt, np.int32), "", "", ""),
            order=row,
            sampling=Sampling(24, temperature=1.3, seed=2),
            samples=[None] * 4,
            issued=0,
            has_baseline=True,
        )
        for row, prompt in prompts
    ]
    done = await collect(live.engine, [request for group in groups for request in group.requests()])
    for row, prompt in prompts:
        greedy = reference_greedy(live.folder, prompt, 24)
        assert done[row, 3].token_ids.tolist() == greedy
        sampled = [done[row, index].token_ids.tolist() for index in range(3)]
        assert greedy not in sampled
        assert len(set(map(tuple, sampled))) == 3


async def test_shard_layouts_say_where_every_element_is_kept(live: Live) -> None:
    kept = {}
    for name, tensor in load_file(live.folder / "model.safetensors").items():
        kept[name] = np.zeros((len(tensor), 1) if tensor.ndim == 1 else tensor.shape, bool)
    for shard_layout in live.engine.shard_layouts():
        assert set(shard_layout.tensors) <= kept.keys()
        for t, row, rows, column, columns, _, _, stride in shard_layout.boxes.tolist():
            kept[shard_layout.tensors[t]][row : row + rows, column : column + columns] = True
            assert stride >= columns
    assert [name for name, elements in kept.items() if not elements.all()] == []


async def test_a_push_makes_the_new_weights_live_and_nothing_else(live: Live) -> None:
    """What was generated before leaves nothing behind: no key, no value, no half of a fused tensor."""
    before = await collect(live.engine, [ask(prompt, row=row) for row, prompt in enumerate(PROMPTS)])
    await live.push()
    version, sums = await live.engine.checksums()
    tensors = load_file(live.folder / "model.safetensors")
    assert version == live.engine.version == live.version
    assert sums == {name: xxhash.xxh3_64_intdigest(t.numpy().tobytes()) for name, t in tensors.items()}
    after = await collect(live.engine, [ask(prompt, row=row) for row, prompt in enumerate(PROMPTS)])
    for row, prompt in enumerate(PROMPTS):
        assert after[row, 0].token_ids.tolist() == reference_greedy(live.folder, prompt, 24)
        assert after[row, 0].spans == (VersionSpan(live.version, 0, 24),)
        expected = logprobs_of(live.folder, prompt, after[row, 0].token_ids)
        np.testing.assert_allclose(after[row, 0].logprobs, expected, atol=1e-4)
        stale = logprobs_of(live.other, prompt, before[row, 0].token_ids)
        np.testing.assert_allclose(before[row, 0].logprobs, stale, atol=1e-4)
    (scored,) = await live.engine.score_tokens([np.array(PROMPTS[2], np.int32)])
    np.testing.assert_allclose(scored, logprobs_of(live.folder, PROMPTS[2][:1], PROMPTS[2][1:]), atol=1e-4)
