"""What every engine behind services/rollout/engines/base.py must do, measured against transformers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.coordinator.groups import PendingGroup
from services.rollout.engines.base import Completion, Engine
from services.rollout.engines.local import LocalEngine
from services.runtime.errors import UserError
from services.trainer.publish import Publisher
from services.weights.plan import plan
from services.wire.types import (
    BOX,
    Catalog,
    FinishReason,
    GroupId,
    GroupRequest,
    PauseMode,
    Prompt,
    Sampling,
    Version,
    VersionSpan,
)
from tests.conftest import write_model

V0, V1 = Version("a3f0", 0), Version("a3f0", 1)
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)
PROMPTS = [[7, 30, 12], [5], [40, 41, 42, 43, 44, 45, 46, 47, 3, 4, 5, 6], [9, 9, 9, 9, 9, 9]]

StartEngine = Callable[..., Awaitable[Engine]]


async def start_local(
    folder: Path, *, slots: int = 8, max_length: int = 512, dtype: str = "float32"
) -> Engine:
    return LocalEngine(folder, dtype=getattr(torch, dtype), slots=slots, max_length=max_length, version=V0)


@pytest.fixture(params=[start_local])
async def start_engine(request: pytest.FixtureRequest) -> AsyncIterator[StartEngine]:
    engines: list[Engine] = []

    async def start(*args: object, **settings: object) -> Engine:
        engines.append(await request.param(*args, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


@cache
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference_greedy(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    model = reference(folder)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_logits(folder: Path, prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
    """[T, V] in front of each token of the response."""
    logits = reference(folder)(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1].double().numpy()


def sampling_logprobs(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """[V] of one position, by the definition: temperature, then the top k, then the smallest set of
    probability top_p, each renormalised."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    mass_before = np.cumsum(weights[order]) - weights[order]
    weights[order[mass_before >= top_p]] = 0
    with np.errstate(divide="ignore"):
        return np.log(weights / weights.sum())


def ask(
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    *,
    row: int = 0,
    indices: Sequence[int] = (0,),
    attempt: int = 0,
) -> GroupRequest:
    return GroupRequest(
        GroupId("toy", 0, row),
        np.array(prompt, np.int32),
        tuple(indices),
        (attempt,) * len(indices),
        sampling,
    )


async def collect(engine: Engine, requests: Sequence[GroupRequest]) -> dict[tuple[int, int], Completion]:
    """By row and index; every sample exactly once."""
    found: dict[tuple[int, int], Completion] = {}
    async with asyncio.timeout(60):
        async for completions in engine.generate(requests):
            for completion in completions:
                key = (completion.group.prompt, completion.index)
                assert key not in found
                found[key] = completion
    assert sorted(found) == sorted((r.group.prompt, index) for r in requests for index in r.indices)
    return found


async def one(engine: Engine, request: GroupRequest) -> Completion:
    (completion,) = (await collect(engine, [request])).values()
    return completion


@pytest.fixture(params=["tiny_qwen2", "tiny_qwen2_tied", "tiny_qwen3"])
def any_model(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


async def test_greedy_tokens_and_logprobs_equal_transformers(start_engine, any_model):
    engine = await start_engine(any_model)
    requests = [ask(prompt, row=row) for row, prompt in enumerate(PROMPTS)]
    for (row, _), completion in (await collect(engine, requests)).items():
        assert completion.token_ids.tolist() == reference_greedy(any_model, PROMPTS[row], 24)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.spans == (VersionSpan(V0, 0, 24),)
        expected = [
            sampling_logprobs(logits, 1.0, 0, 1.0)[token]
            for logits, token in zip(
                reference_logits(any_model, PROMPTS[row], completion.token_ids),
                completion.token_ids,
                strict=True,
            )
        ]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 10, 1.0), (1.0, 0, 0.7), (0.8, 20, 0.9), (1.0, 1, 1.0)],
)
async def test_logprobs_are_those_of_the_sampling_distribution(
    start_engine, tiny_qwen3, temperature, top_k, top_p
):
    engine = await start_engine(tiny_qwen3, slots=16)
    sampling = Sampling(20, temperature, top_p, top_k)
    for (row, _), completion in (
        await collect(engine, [ask(p, sampling, row=i, indices=range(4)) for i, p in enumerate(PROMPTS)])
    ).items():
        expected = [
            sampling_logprobs(logits, temperature, top_k, top_p)[token]
            for logits, token in zip(
                reference_logits(tiny_qwen3, PROMPTS[row], completion.token_ids),
                completion.token_ids,
                strict=True,
            )
        ]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


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


async def test_samples_of_a_group_differ_and_start_from_the_same_prompt(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=3)
    done = await collect(engine, [ask(PROMPTS[2], Sampling(12), indices=range(8))])
    assert len({tuple(c.token_ids) for c in done.values()}) == 8
    greedy = await collect(engine, [ask(PROMPTS[2], indices=range(8))])
    expected = reference_greedy(tiny_qwen2, PROMPTS[2], 24)
    assert [c.token_ids.tolist() for c in greedy.values()] == [expected] * 8


async def test_a_group_with_a_greedy_member_has_its_greedy_tokens(start_engine, any_model):
    """As ReMax's dataflow asks: samples and baseline of each group in one call, and in few slots."""
    engine = await start_engine(any_model, slots=3)
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
    done = await collect(engine, [request for group in groups for request in group.requests()])
    for row, prompt in prompts:
        greedy = reference_greedy(any_model, prompt, 24)
        assert done[row, 3].token_ids.tolist() == greedy
        sampled = [done[row, index].token_ids.tolist() for index in range(3)]
        assert greedy not in sampled
        assert len(set(map(tuple, sampled))) == 3


async def test_stop_token_ends_the_response_and_belongs_to_it(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2)
    full = await one(engine, ask(PROMPTS[0]))
    stop = int(full.token_ids[4])
    end = full.token_ids.tolist().index(stop) + 1
    cut = await one(engine, ask(PROMPTS[0], replace(GREEDY, stop_token_ids=(63, stop)), row=1))
    assert cut.token_ids.tolist() == full.token_ids[:end].tolist()
    assert cut.finish_reason is FinishReason.STOP
    assert full.text.startswith(cut.text)
    assert len(cut.text) < len(full.text)


async def test_stop_string_ends_the_response_and_is_not_in_the_text(start_engine, tiny_qwen2):
    """The tokenizer has one token per character, so a stop of three characters spans three tokens."""
    engine = await start_engine(tiny_qwen2)
    full = await one(engine, ask(PROMPTS[0]))
    stop = full.text[6:9]
    at = full.text.find(stop)
    cut = await one(engine, ask(PROMPTS[0], replace(GREEDY, stop=("\n\n", stop)), row=1))
    assert cut.text == full.text[:at]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) < 24
    assert cut.token_ids.tolist() == full.token_ids[: len(cut.token_ids)].tolist()


async def test_response_ends_where_the_model_does(start_engine, tiny_qwen2):
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
    retried = [replace(request, attempts=(3,) * 5) for request in reversed(requests)]
    for key, completion in (await collect(narrow, retried)).items():
        assert completion.token_ids.tolist() == wide[key].token_ids.tolist()
        assert completion.attempt == 3
    alone = await one(narrow, ask(PROMPTS[3], sampling, row=3, indices=[2]))
    assert alone.token_ids.tolist() == wide[3, 2].token_ids.tolist()
    reseeded = await one(narrow, ask(PROMPTS[3], replace(sampling, seed=6), row=3, indices=[2]))
    assert reseeded.token_ids.tolist() != wide[3, 2].token_ids.tolist()


async def test_settings_of_a_neighbour_change_nothing(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2)
    plain = await one(engine, ask(PROMPTS[0], Sampling(20)))
    others = [
        ask(PROMPTS[1], GREEDY, row=1),
        ask(PROMPTS[2], Sampling(9, temperature=0.5, top_k=3), row=2),
        ask(PROMPTS[3], Sampling(30, top_p=0.5, stop=("zz",), stop_token_ids=(1, 2, 3)), row=3),
    ]
    mixed = await collect(engine, [*others, ask(PROMPTS[0], Sampling(20))])
    assert mixed[0, 0].token_ids.tolist() == plain.token_ids.tolist()
    np.testing.assert_allclose(mixed[0, 0].logprobs, plain.logprobs, atol=1e-5)


async def test_abort_returns_what_was_produced(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=2)
    long = Sampling(300, temperature=0.0)
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=5), row=1),
        ask(PROMPTS[0], long, row=10),
        ask(PROMPTS[0], long, row=11, indices=(0, 1)),
    ]
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        assert [c.group.prompt for c in await anext(stream)] == [1]  # so row 10 has tokens too
        assert await engine.abort("toy/0/1") == 3  # a prefix of all three that are left
        aborted = {(c.group.prompt, c.index): c async for completions in stream for c in completions}
    assert sorted(aborted) == [(10, 0), (11, 0), (11, 1)]
    assert {c.finish_reason for c in aborted.values()} == {FinishReason.ABORT}
    partial = aborted[10, 0]
    assert 5 <= len(partial.token_ids) == len(partial.logprobs) < 300
    assert partial.spans == (VersionSpan(V0, 0, len(partial.token_ids)),)
    assert partial.token_ids.tolist() == reference_greedy(tiny_qwen2, PROMPTS[0], len(partial.token_ids))
    assert len(aborted[11, 1].token_ids) == 0  # never had a slot
    assert await engine.abort("") == 0
    assert (await one(engine, ask(PROMPTS[0]))).finish_reason is FinishReason.LENGTH


async def test_pause_wait_finishes_what_runs_and_holds_the_rest(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=2)
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=1), row=1),
        *(ask(PROMPTS[0], replace(GREEDY, max_new_tokens=40), row=row) for row in (2, 3, 4)),
    ]
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        await anext(stream)
        await engine.pause(PauseMode.WAIT)
        await engine.pause(PauseMode.WAIT)
        assert (engine.info().running, engine.info().queued) == (0, 1)
        done = [c.group.prompt for c in await anext(stream)]
        assert done == [2, 3]
        await engine.resume()
        assert [c.group.prompt for c in await anext(stream)] == [4]


async def test_pause_in_place_keeps_the_sequences(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2)
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=3), row=1),
        ask(PROMPTS[0], Sampling(150, temperature=0.0), row=2),
    ]
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        await anext(stream)
        await engine.pause(PauseMode.IN_PLACE)
        held = engine.info()
        assert (held.running, held.queued) == (1, 0)
        await engine.checksums()  # whatever would still have decoded has had its turn
        assert engine.info().tokens_generated == held.tokens_generated
        await engine.resume()
        (completion,) = await anext(stream)
    assert completion.token_ids.tolist() == reference_greedy(tiny_qwen2, PROMPTS[0], 150)


class FakeTrainer:
    """Publishes the weights of a Hugging Face folder, as one trainer rank would."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        tensors = load_file(folder / "model.safetensors")
        boxes, offset = [], 0
        for t, tensor in enumerate(tensors.values()):
            rows, columns = tensor.shape if tensor.ndim == 2 else (len(tensor), 1)
            boxes.append((t, 0, rows, 0, columns, 0, offset, columns))
            offset += tensor.numel()
        catalog = Catalog(tuple(tensors), np.array(boxes, BOX))
        self.plan = plan([catalog], [engine.catalog()])
        self.publisher = Publisher(0, [torch.cat([tensor.flatten() for tensor in tensors.values()])])

    async def stage(self, engine: Engine, version: Version) -> None:
        dtype = engine.info().dtype
        published = self.publisher.publish(version, dtype, [self.plan.id], [self.plan], 0)
        assert published.last
        await engine.receive(version, published.streams, self.plan)


@pytest.fixture(scope="session")
def next_qwen3(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """tiny_qwen3 after an update."""
    folder = tmp_path_factory.mktemp("next")
    write_model(folder, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def continued(old: Path, new: Path, prompt: Sequence[int], response: Sequence[int], change: int) -> list[int]:
    """Greedy tokens of the new model after `change` tokens of the old one, whose keys and values stay."""
    ids = [*prompt, *response[: change - 1]]
    cache = reference(old)(torch.tensor([ids]), use_cache=True).past_key_values
    tokens = [*response[:change]]
    while len(tokens) < len(response):
        logits = reference(new)(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("pause", [True, False])
async def test_weights_change_between_two_tokens(start_engine, tiny_qwen3, next_qwen3, pause):
    engine = await start_engine(tiny_qwen3, slots=2)
    trainer = FakeTrainer(next_qwen3, engine)
    requests = [
        ask(PROMPTS[1], replace(GREEDY, max_new_tokens=5), row=1),
        ask(PROMPTS[0], Sampling(250, temperature=0.0), row=2),
        ask(PROMPTS[3], replace(GREEDY, max_new_tokens=150), row=3, indices=(0, 1)),
    ]
    async with asyncio.timeout(60), aclosing(engine.generate(requests)) as stream:
        await trainer.stage(engine, V1)
        assert engine.version == V0
        await anext(stream)
        if pause:
            await engine.pause(PauseMode.IN_PLACE)
        assert 0 <= await engine.commit(V1) < 1
        if pause:
            await engine.resume()
        assert engine.version == V1
        done = {(c.group.prompt, c.index): c async for completions in stream for c in completions}
    crossed = done[2, 0]
    (old, new) = crossed.spans
    assert (old.version, old.start, new.version, new.end) == (V0, 0, V1, 250)
    assert 5 <= old.end == new.start < 250
    tokens = crossed.token_ids.tolist()
    assert tokens[: old.end] == reference_greedy(tiny_qwen3, PROMPTS[0], old.end)
    assert tokens == continued(tiny_qwen3, next_qwen3, PROMPTS[0], tokens, old.end)
    late = done[3, 1]  # waited for a slot: the prompt is prefilled anew, nothing of the old weights is left
    assert late.spans == (VersionSpan(V1, 0, 150),)
    assert late.token_ids.tolist() == reference_greedy(next_qwen3, PROMPTS[3], 150)


async def test_rolled_back_weights_never_live(start_engine, tiny_qwen3, next_qwen3):
    engine = await start_engine(tiny_qwen3)
    trainer = FakeTrainer(next_qwen3, engine)
    before = await engine.checksums()
    await trainer.stage(engine, V1)
    await engine.rollback(V1)
    assert await engine.checksums() == before
    await trainer.stage(engine, V1)
    await engine.commit(V1)
    version, sums = await engine.checksums()
    tensors = load_file(next_qwen3 / "model.safetensors")
    assert version == V1
    assert sums == {name: xxhash.xxh3_64_intdigest(t.numpy().tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([3, 64]), "token id 64, expected 0 to 63"),
        (ask([-1, 3]), "token id -1"),
        (ask([]), "has 0 tokens"),
        (ask([3] * 40), "has 40 tokens, expected 1 to 39"),
        (ask([3], Sampling(0)), "max_new_tokens"),
        (ask([3], Sampling(1, top_p=0.0)), "top_p"),
        (ask([3], Sampling(1, temperature=float("nan"))), "temperature"),
        (ask([3], Sampling(1, temperature=1e-40)), "temperature"),
        (ask([3], Sampling(1, stop=("",))), "stop"),
    ],
)
async def test_bad_requests_are_refused_and_harm_nobody(start_engine, tiny_qwen2, request_, message):
    engine = await start_engine(tiny_qwen2, max_length=40)
    running = asyncio.create_task(one(engine, ask(PROMPTS[0], row=5)))
    with pytest.raises(UserError, match=message):
        await collect(engine, [ask(PROMPTS[1], row=6), request_])
    assert (await running).token_ids.tolist() == reference_greedy(tiny_qwen2, PROMPTS[0], 24)


async def test_a_call_that_ends_early_frees_its_slots(start_engine, tiny_qwen2):
    engine = await start_engine(tiny_qwen2, slots=2, max_length=512)
    endless = [ask(PROMPTS[0], Sampling(500), row=row, indices=range(4)) for row in range(20)]

    async def drain() -> None:
        async with asyncio.timeout(0.05), aclosing(engine.generate(endless)) as stream:
            async for _ in stream:
                pass

    with pytest.raises(TimeoutError):
        await drain()
    assert await engine.abort("") == 0
    assert (engine.info().running, engine.info().queued) == (0, 0)


async def test_bfloat16_follows_the_same_weights(start_engine, tiny_qwen2, tmp_path):
    """Against transformers in float32 with weights that were rounded to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.bfloat16).float()
    model.save_pretrained(tmp_path)
    engine = await start_engine(tiny_qwen2, dtype="bfloat16")
    assert engine.info().dtype == "bfloat16"
    done = await collect(
        engine, [ask(p, Sampling(24), row=i, indices=range(4)) for i, p in enumerate(PROMPTS)]
    )
    errors = []
    for (row, _), completion in done.items():
        logits = reference_logits(tmp_path, PROMPTS[row], completion.token_ids)
        for at, token, got in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            errors.append(abs(sampling_logprobs(at, 1.0, 0, 1.0)[token] - got))
    assert np.mean(errors) < 0.02
    assert np.max(errors) < 0.2
