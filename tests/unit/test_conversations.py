"""Rows with answers as sequences with loss masks: by hand, and against transformers with real templates."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.coordinator.data.conversations import SupervisedSequence, encode_rows
from atoll.coordinator.data.dataset_rows import Dataset, read_supervised_rows
from atoll.coordinator.data.datasets import SupervisedSource
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Renderer
from tests.conftest import write_tokenizer
from tests.gateway.model_folders import make_folder, package_folder

Row = list[dict[str, Any]]
# grows as Qwen2.5's: u and a for the roles, the end-of-sequence token behind an answer
GROWING = (
    "{% for m in messages %}{{ m.role[0] + m.content }}{% for call in m.tool_calls %}"
    "{{ call.function.name + '(' + call.function.arguments.x + ')' }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
# shows an answer only at the end of the conversation
FORGETFUL = GROWING.replace(
    "messages %}", "messages %}{% if m.role == 'assistant' and not loop.last %}{% continue %}{% endif %}", 1
)


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def read(
    renderer: Renderer, folder: Path, *rows: dict[str, Any], **settings: Any
) -> list[SupervisedSequence]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoded = encode_rows(path, read_supervised_rows(Dataset(path, **settings)), renderer)
    return [sequence for of_row in encoded for sequence in of_row]


def tiny(folder: Path, template: str) -> Renderer:
    """One token per character."""
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"vocab_size": 64}')
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder)


def shown(renderer: Renderer, sequence: SupervisedSequence) -> str:
    """The text, [learned] in brackets."""
    ids, mask = sequence
    pieces = np.split(ids, np.flatnonzero(mask[1:] != mask[:-1]) + 1)
    texts = [renderer.tokenizer.decode(piece.tolist(), skip_special_tokens=False) for piece in pieces]
    return "".join(f"[{text}]" if number % 2 else text for number, text in enumerate(texts))


TWICE = [
    message("user", "1+1="),
    message("assistant", "2"),
    message("user", "+1="),
    message("assistant", "3"),
]


def test_a_conversation_is_one_sequence(tmp_path: Path) -> None:
    renderer = tiny(tmp_path, GROWING)
    [sequence] = read(renderer, tmp_path, {"messages": TWICE})
    # digit d is 3 + d, + is 13, = is 17, a is 24, u is 44, <eos> 1
    assert sequence.token_ids.tolist() == [44, 4, 13, 4, 17, 24, 5, 1, 44, 13, 4, 17, 24, 6, 1]
    assert sequence.loss_mask.tolist() == [False] * 6 + [True] * 2 + [False] * 5 + [True] * 2
    assert (sequence.token_ids.dtype, sequence.loss_mask.dtype) == (np.int32, bool)
    assert shown(renderer, sequence) == "u1+1=a[2<eos>]u+1=a[3<eos>]"


def test_a_history_that_is_rewritten_begins_a_new_sequence(tmp_path: Path) -> None:
    renderer = tiny(tmp_path, FORGETFUL)
    sequences = read(renderer, tmp_path, {"messages": TWICE}, {"prompt": "0", "response": "1"})
    assert [shown(renderer, sequence) for sequence in sequences] == [
        "u1+1=a[2<eos>]",
        "u1+1=u+1=a[3<eos>]",
        "u0a[1<eos>]",
    ]


USED = [
    message("user", "5"),
    message("assistant", "so ", tool_calls=[call("f", x="5"), call("g", x="6")]),
    message("tool", " 7 "),
    message("assistant", "7"),
    message("tool", "8"),
]


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        (("assistant",), "u5a[so f(5)g(6)<eos>]t 7 a[7<eos>]"),
        (("assistant", "tool"), "u5a[so f(5)g(6)<eos>]t [7] a[7<eos>]t[8]"),
        (("tool", "user"), "u[5]aso f(5)g(6)<eos>t [7] a7<eos>t[8]"),
    ],
)
def test_roles_that_are_learned(tmp_path: Path, learn: Sequence[str], expected: str) -> None:
    renderer = tiny(tmp_path, GROWING)
    [sequence] = read(renderer, tmp_path, {"messages": USED}, learn=learn)
    assert shown(renderer, sequence) == expected


def test_no_text_is_learned_twice(tmp_path: Path) -> None:
    renderer = tiny(tmp_path, FORGETFUL)
    row = [*TWICE, message("tool", "4")]
    sequences = read(renderer, tmp_path, {"messages": row}, learn=["user", "assistant", "tool"])
    assert [shown(renderer, sequence) for sequence in sequences] == [
        "u[1+1=]a[2<eos>]",
        "u1+1=u[+1=]a[3<eos>]",
        "u1+1=u+1=t[4]",
    ]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((None, 0, None, None), "u1+1=a2<eos>u+1=a[3<eos>]"),
        ((None, 1, 1, 0), "u1+1=a[2<eos>]u[+1=]"),
        ((0, 0.0, 0, 1.0), "u1+1=a2<eos>u+1=a[3<eos>]"),
    ],
)
def test_a_weight_decides_for_its_message(
    tmp_path: Path, weights: Sequence[float | None], expected: str
) -> None:
    renderer = tiny(tmp_path, GROWING)
    row = [{**turn, "weight": weight} for turn, weight in zip(TWICE, weights, strict=True)]
    [sequence] = read(renderer, tmp_path, {"messages": row})
    assert shown(renderer, sequence).startswith(expected)


def test_the_prompt_of_a_response_is_never_learned(tmp_path: Path) -> None:
    renderer = tiny(tmp_path, GROWING)
    sequences = read(
        renderer,
        tmp_path,
        {"prompt": TWICE[:3], "response": "3"},
        {"prompt": TWICE[:1], "completion": TWICE[1:]},
        {"messages": [message("assistant", "0"), *TWICE[:2]]},  # nothing is before the first message
    )
    assert [shown(renderer, sequence) for sequence in sequences] == [
        "u1+1=a2<eos>u+1=a[3<eos>]",
        "u1+1=a[2<eos>]u+1=a[3<eos>]",
        "a0<eos>u1+1=a[2<eos>]",
    ]


@pytest.mark.parametrize(
    ("template", "row", "learn", "message"),
    [
        (
            GROWING + "{{ tools.x.y }}",
            TWICE,
            ["assistant"],
            "row 0 .*: the chat template refuses the messages",
        ),
        ("{{ messages[0].content }}a", USED, ["assistant"], "does not show the call of f; use one"),
        (GROWING.replace("m.content", "''"), USED, ["assistant"], "does not show the content beside tool_ca"),
        (
            GROWING.replace("%}a{", "%}b{"),
            USED,
            ["assistant"],
            r"does not write tool_calls after .* prompt 'u5b'",
        ),
        (GROWING.replace("m.content", "m.content[:1]"), TWICE, ["user"], "alters what is learned of user"),
    ],
)
def test_templates_that_cannot_be_learned_from(
    tmp_path: Path, template: str, row: Row, learn: Sequence[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(tiny(tmp_path, template), tmp_path, {"messages": row}, learn=learn)


def test_rows_of_one_answer_have_the_digest_that_they_always_had(tmp_path: Path) -> None:
    """Of the prompt's ids and the response's: runs of before continue."""
    sequences = read(tiny(tmp_path, GROWING), tmp_path, {"prompt": "1", "response": "2"})
    parts = [np.array(ids, np.int32).tobytes() for ids in ([44, 4, 24], [5, 1])]
    whole = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    digest = hashlib.blake2b(whole, digest_size=8).hexdigest()
    assert SupervisedSource([sequences], [1.0], seed=0, shuffle=True).cursor.digests == (digest,)


# Real tokenizers and templates

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALLS = [
    message("system", "Be brief."),
    message("user", "What is 12 + 34?"),
    message("assistant", "", tool_calls=[call("add", a=12, b=34)]),
    message("tool", "46", tool_call_id="call_0"),
    message("assistant", "It is 46."),
    message("user", "And 1 + 1, \u00e9?"),
    message("assistant", "", tool_calls=[call("add", a=1, b=1)]),
    message("tool", '{"sum": 2}', tool_call_id="call_0"),
    message("assistant", "2 \u2713"),
]
THOUGHTS = [
    message("user", "What is 12 + 34?"),
    message("assistant", "<think>\nI call.\n</think>\n\n", tool_calls=[call("add", a=12, b=34)]),
    message("tool", "46", tool_call_id="call_0"),
    message("assistant", "<think>\nDone.\n</think>\n\n46"),
    message("user", "Thanks"),
    message("assistant", "<think>\n\n</think>\n\nYou are welcome."),
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
LLAMA_CALL = '{"name": "add", "parameters": {"a": %d, "b": %d}}'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make_folder(tmp_path_factory.mktemp(family), family))


@pytest.mark.parametrize(
    ("family", "row", "answers", "num_sequences"),
    [
        ("qwen2.5", CALLS, [CALL % (12, 34), "It is 46.", CALL % (1, 1), "2 \u2713"], 1),
        ("qwen3", CALLS, [CALL % (12, 34), "It is 46.", CALL % (1, 1), "2 \u2713"], 1),
        ("llama3.1", CALLS, [LLAMA_CALL % (12, 34), "It is 46.", LLAMA_CALL % (1, 1), "2 \u2713"], 1),
        (  # a new question removes earlier thoughts, the result of a tool does not
            "qwen3",
            THOUGHTS,
            [
                f"<think>\nI call.\n</think>\n\n{CALL % (12, 34)}",
                "<think>\nDone.\n</think>\n\n46",
                "<think>\n\n</think>\n\nYou are welcome.",
            ],
            2,
        ),
        (  # nothing is known of thoughts
            "qwen2.5",
            THOUGHTS,
            [
                f"<think>\nI call.\n</think>\n\n\n{CALL % (12, 34)}",
                "<think>\nDone.\n</think>\n\n46",
                "<think>\n\n</think>\n\nYou are welcome.",
            ],
            1,
        ),
        ("qwen3", CALLS[:3], [f"<think>\n\n</think>\n\n{CALL % (12, 34)}"], 1),  # as it ends a conversation
    ],
)
def test_every_answer_is_learned_after_what_transformers_renders_before_it(
    tmp_path: Path,
    folders: Callable[[str], Path],
    family: str,
    row: Row,
    answers: Sequence[str],
    num_sequences: int,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders(family))
    sequences = read(Renderer(folders(family)), tmp_path, {"messages": row, "tools": [ADD]})
    assert len(sequences) == num_sequences
    places = [i for i, turn in enumerate(row) if turn["role"] == "assistant"]
    expected = [
        (
            tokenizer.apply_chat_template(
                row[:place], tools=[ADD], add_generation_prompt=True, return_dict=False
            ),
            [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id],
        )
        for place, answer in zip(places, answers, strict=True)
    ]
    learned = []
    for ids, mask in sequences:
        bounds = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1), len(ids)]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        learned += [(ids[:start].tolist(), ids[start:end].tolist()) for start, end in pairs]
    assert learned == expected


def test_the_mask_of_transformers(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """TRL's template marks what the assistant says, with the line breaks before and behind it."""
    from transformers import AutoTokenizer

    folder = folders("qwen2.5")
    template = (package_folder("trl") / "chat_templates/qwen2_5_training.jinja").read_text()
    whole = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CALLS, tools=[ADD], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    [(ids, mask)] = read(Renderer(folder), tmp_path, {"messages": CALLS, "tools": [ADD]})
    line_break = 198
    assert [*ids.tolist(), line_break] == whole["input_ids"]
    theirs = np.array(whole["assistant_masks"], bool)
    edges = theirs & (np.array(whole["input_ids"]) == line_break)
    edges &= ~(np.roll(theirs, 1) & np.roll(theirs, -1))  # first or last of a run
    assert edges.sum() == 2 * 4
    np.testing.assert_array_equal(mask, (theirs & ~edges)[:-1])


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3.1"])
def test_contents_of_other_roles_are_found_by_their_characters(
    tmp_path: Path, folders: Callable[[str], Path], family: str
) -> None:
    """Their text may stand elsewhere, too: in a role's name, in an answer."""
    row = [
        message("system", "user"),
        message("user", "assistant"),
        message("assistant", "tool user"),
        message("user", "tool\u00e9 user\n"),
        message("assistant", "user"),
    ]
    renderer = Renderer(folders(family))
    [sequence] = read(renderer, tmp_path, {"messages": row}, learn=["user"])
    pieces = re.findall(r"\[(.*?)\]", shown(renderer, sequence), re.DOTALL)
    assert pieces == ["assistant", "tool\u00e9 user"]
    plain = renderer.render(row, add_generation_prompt=False)
    assert shown(renderer, sequence).replace("[", "").replace("]", "") == plain
