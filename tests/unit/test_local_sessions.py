"""What the local engine keeps of a session's last turn, and what that changes: only what is computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from atoll.rollout.engines.base import Completion
from atoll.rollout.engines.local_decoder import Decoder
from atoll.rollout.engines.local_model import LocalModel
from atoll.rollout.engines.local_weights import BufferLayout
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import Sampling, TurnRequest, Version
from tests.builders import group_id, turn_request

PROMPT, TOOL = [7, 30, 12, 9, 41], [5, 17, 17]


@pytest.fixture(params=["tiny_qwen2", "tiny_llama"])
def folder(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def started(
    folder: Path, *, slots: int = 4, max_length: int = 64, records_routes: bool = False
) -> Decoder[str]:
    spec = read_spec(folder)
    layout = BufferLayout(spec)
    model = LocalModel(spec, layout.bind(layout.read(folder, torch.float32)), max_length, records_routes)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Decoder(model, tokenizer, slots, max_length, Version("", 0))


@torch.inference_mode()
def generate(decoder: Decoder[str], *requests: TurnRequest) -> list[Completion]:
    """In the order of their ids."""
    decoder.submit(requests, "caller")
    done: list[Completion] = []
    while decoder.num_rows or decoder.num_waiting:
        done += [completion for _, completion in decoder.step(admit=True)]
    return sorted(done, key=lambda completion: completion.id)


def ask(context: list[int], turn: int, session: str = "s", row: int = 0) -> TurnRequest:
    return turn_request(context, group=group_id(row), turn=turn, sampling=Sampling(4), session=session)


def test_a_sessions_next_turn_computes_what_it_adds(folder: Path) -> None:
    decoder, plain = started(folder), started(folder)
    (first,) = generate(decoder, ask(PROMPT, 0))
    assert decoder.tokens_prefilled == len(PROMPT)
    context = [*PROMPT, *first.token_ids.tolist(), *TOOL]
    (second,) = generate(decoder, ask(context, 1))
    # the model had not read the last token that it drew
    assert decoder.tokens_prefilled == len(PROMPT) + 1 + len(TOOL)
    (whole,) = generate(plain, ask(context, 1, session=""))
    assert plain.tokens_prefilled == len(context)
    np.testing.assert_array_equal(second.token_ids, whole.token_ids)
    np.testing.assert_allclose(second.logprobs, whole.logprobs, atol=1e-5)


def test_a_sessions_turns_record_the_routes_of_each_token_once(tiny_qwen3_moe: Path) -> None:
    decoder, plain = (started(tiny_qwen3_moe, records_routes=True) for _ in range(2))
    (first,) = generate(decoder, ask(PROMPT, 0))
    context = [*PROMPT, *first.token_ids.tolist(), *TOOL]
    (second,) = generate(decoder, replace(ask(context, 1), num_routed=len(PROMPT) + 3))
    (whole,) = generate(plain, ask(context, 1, session=""))
    assert first.routes is not None
    assert second.routes is not None
    assert (len(first.routes), len(second.routes)) == (len(PROMPT) + 3, 1 + len(TOOL) + 3)
    np.testing.assert_array_equal(np.concatenate([first.routes, second.routes])[:, :1], whole.routes[:, :1])


def test_a_retracted_sample_keeps_the_routes_that_it_had(tiny_qwen3_moe: Path) -> None:
    decoder, plain = (started(tiny_qwen3_moe, records_routes=True) for _ in range(2))
    with torch.inference_mode():
        decoder.submit([ask(PROMPT, 0, session="")], "caller")
        decoder.step(admit=True)
        decoder.retract()
    (retracted,) = generate(decoder)
    (expected,) = generate(plain, ask(PROMPT, 0, session=""))
    np.testing.assert_array_equal(retracted.routes, expected.routes)
    assert (expected.routes[len(PROMPT) - 1 :] < 4).all()  # of the last layer, too


def test_a_context_that_parts_from_the_last_turn_computes_the_rest(folder: Path) -> None:
    decoder, plain = started(folder), started(folder)
    (first,) = generate(decoder, ask(PROMPT, 0))
    (again,) = generate(decoder, ask(PROMPT, 1))  # the same context: its last token gives the logits
    assert decoder.tokens_prefilled == len(PROMPT) + 1
    assert again.token_ids.tolist() != first.token_ids.tolist()  # another turn draws other numbers
    shorter = [*PROMPT[:2], 3, 3]
    (third,) = generate(decoder, ask(shorter, 2))
    assert decoder.tokens_prefilled == len(PROMPT) + 1 + 2
    (whole,) = generate(plain, ask(shorter, 2, session=""))
    np.testing.assert_array_equal(third.token_ids, whole.token_ids)
    np.testing.assert_allclose(third.logprobs, whole.logprobs, atol=1e-5)


def test_sessions_beside_each_other_keep_to_themselves(folder: Path) -> None:
    decoder, plain = started(folder), started(folder)
    prompts = [PROMPT, [8, 8, 2], [3, 1, 4, 1, 5, 9]]
    firsts = generate(decoder, *(ask(p, 0, f"s{row}", row) for row, p in enumerate(prompts)))
    contexts = [[*p, *c.token_ids.tolist(), *TOOL] for p, c in zip(prompts, firsts, strict=True)]
    seconds = generate(decoder, *(ask(c, 1, f"s{row}", row) for row, c in enumerate(contexts)))
    wholes = generate(plain, *(ask(c, 1, "", row) for row, c in enumerate(contexts)))
    for second, whole in zip(seconds, wholes, strict=True):
        np.testing.assert_array_equal(second.token_ids, whole.token_ids)
        np.testing.assert_allclose(second.logprobs, whole.logprobs, atol=1e-5)
    assert decoder.tokens_prefilled == sum(map(len, prompts)) + len(prompts) * (1 + len(TOOL))


def test_a_commit_drops_what_was_kept(folder: Path) -> None:
    decoder = started(folder)
    (first,) = generate(decoder, ask(PROMPT, 0))
    decoder.set_version(Version("", 1))
    context = [*PROMPT, *first.token_ids.tolist(), *TOOL]
    generate(decoder, ask(context, 1))
    assert decoder.tokens_prefilled == len(PROMPT) + len(context)


@torch.inference_mode()
def test_keys_of_older_weights_are_not_kept(folder: Path) -> None:
    decoder = started(folder)
    decoder.submit([ask(PROMPT, 0)], "caller")
    decoder.step(admit=True)
    decoder.set_version(Version("", 1))
    (first,) = generate(decoder)
    assert [span.version.number for span in first.spans] == [0, 1]
    context = [*PROMPT, *first.token_ids.tolist(), *TOOL]
    generate(decoder, ask(context, 1))
    assert decoder.tokens_prefilled == len(PROMPT) + len(context)


def test_the_sessions_that_waited_longest_lose_theirs(folder: Path) -> None:
    """Room for as many positions as the rows may hold: 16, or two turns of 8."""
    decoder = started(folder, slots=1, max_length=16)
    for row in range(3):
        generate(decoder, ask(PROMPT, 0, f"s{row}", row))
    before = decoder.tokens_prefilled
    generate(decoder, ask(PROMPT, 1, "s0"), ask(PROMPT, 1, "s2", 2))
    assert decoder.tokens_prefilled == before + len(PROMPT) + 1
