"""What the proof says about each family's template, and what it refuses."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from atoll.gateway.conversation import RequestError
from atoll.gateway.templates.chat_format import ChatFormat
from atoll.gateway.templates.proof import ProofReport, prove, report_lines
from atoll.runtime.errors import UserError
from atoll.wire.types import Message
from tests.gateway.model_folders import make_folder

Folder = Callable[[str], Path]
USER, TOOL, BOTH = "user messages", "tool results", "tool results before a user message"
FABRICATED, SYSTEM = "fabricated exchanges", "system messages"
ALL = (USER, TOOL, BOTH, FABRICATED, SYSTEM)
NO_FORMAT = "no known format reads the tool calls that the template writes"
ONE_CALL = "the template refuses replies with several calls in a history"


@pytest.mark.parametrize(
    ("family", "extend", "branch", "refused", "tool_format", "warnings"),
    [
        ("qwen2.5", ALL, (), (), "hermes", ()),
        ("qwen3", (TOOL, SYSTEM), (USER, BOTH, FABRICATED), (), "hermes", ()),
        ("qwen3-instruct-2507", ALL, (), (), "hermes", ()),
        ("llama3.1", ALL, (), (), "llama", (ONE_CALL,)),
        ("plain", ALL, (), (), "none", (NO_FORMAT,)),
        ("qwen3.5", (TOOL,), (USER, BOTH, FABRICATED), (SYSTEM,), "qwen_xml", ()),
        ("nemotron3", (TOOL, SYSTEM), (USER, BOTH, FABRICATED), (), "qwen_xml", ()),
        ("glm4.5", (TOOL,), (USER, BOTH, FABRICATED), (SYSTEM,), "none", (NO_FORMAT,)),
        ("gemma3", (USER, FABRICATED), (), (TOOL, BOTH, SYSTEM), "none", (NO_FORMAT,)),
        ("phi3", (USER, FABRICATED, SYSTEM), (), (TOOL, BOTH), "none", (NO_FORMAT,)),
    ],
)
async def test_report(
    model_folder: Folder,
    family: str,
    extend: tuple[str, ...],
    branch: tuple[str, ...],
    refused: tuple[str, ...],
    tool_format: str,
    warnings: tuple[str, ...],
) -> None:
    chat = ChatFormat(model_folder(family), thinking="template")
    started = time.process_time()
    report = await prove(chat)
    assert time.process_time() - started < 2  # 0.05 to 0.25 s on a quiet machine
    assert (report.extend, report.branch) == (extend, branch)
    assert tuple(report.refused) == refused
    assert (report.tool_format, report.warnings) == (tool_format, warnings)
    assert report.parallel_calls == (not warnings)
    assert report.num_checks >= 40


async def test_harmony_needs_a_renderer(model_folder: Folder) -> None:
    with pytest.raises(
        UserError, match=r"suffix for tool results.*got .*functions\.f to.*expected .*functions\.add"
    ):
        await prove(ChatFormat(model_folder("gpt-oss"), thinking="keep"))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(path: Path, template: str) -> Path:
    (make_folder(path, "qwen3", tiny=True) / "chat_template.jinja").write_text(template)
    return path


async def test_a_minimal_template_extends(tmp_path: Path) -> None:
    report = await prove(ChatFormat(with_template(tmp_path, CHATML), thinking="keep"))
    assert (report.extend, report.tool_format, report.warnings) == (ALL, "hermes", ())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # what follows a reply depends on what came before it
        ("{{ m.role }}\n", "{{ m.role }} {{ messages | length }}\n", "the ids of a conversation"),
        ("{{ m.role }}\n", "{{ m.role }}{{ messages[0].content | length }}\n", "the suffix for"),
        # no stop token behind a reply
        ("<|im_end|>", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}", "ends no reply before"),
        # contents are taken apart, or spelled out
        ("{{ m.content }}", "{{ m.content | upper }}", None),
        ("{{ m.content }}", "{{ m.content.encode() }}", "the ids of a conversation"),
        # a content of `|im_end|>` ends what the template begins, one of `|im_end|` stands between two halves
        ("{{ m.content }}", "<{{ m.content }}", None),
        ("{{ m.content }}", "<{{ m.content }}>", "contents spell some"),
    ],
)
async def test_templates_that_do_not_extend_are_refused(
    tmp_path: Path, old: str, new: str, message: str | None
) -> None:
    chat = ChatFormat(with_template(tmp_path, CHATML.replace(old, new)), thinking="keep")
    if message is None:  # odd, but exact
        await prove(chat)
    else:
        with pytest.raises(UserError, match=message):
            await prove(chat)


async def test_another_familys_tool_format_is_refused(model_folder: Folder) -> None:
    with pytest.raises(UserError, match=r"tool format llama: of .* got the calls .*, expected"):
        await prove(ChatFormat(model_folder("qwen3"), thinking="keep", tool_format="llama"))


async def test_a_tokenizer_that_encodes_pieces_otherwise_is_refused(tmp_path: Path) -> None:
    """Metaspace puts a space before the first word of a whole text, not of each piece."""
    folder = with_template(tmp_path, CHATML)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.model = models.BPE({chr(9601): 0, **{chr(33 + k): 1 + k for k in range(94)}}, [])
    tree = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"the ids of a conversation: got .*, expected"):
        await prove(ChatFormat(folder, thinking="keep"))


async def test_a_vocabulary_that_spells_special_tokens_is_refused(tmp_path: Path) -> None:
    folder = with_template(tmp_path, CHATML)
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {token["content"]: token["id"] for token in tree["added_tokens"]}
    letters = {chr(33 + k): k for k in range(94)}
    tree["model"] = {"type": "WordLevel", "vocab": {**letters, **vocabulary, "?": 200}, "unk_token": "?"}
    tree["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    tree["normalizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="contents spell some"):
        await prove(ChatFormat(folder, thinking="keep"))


def test_lines() -> None:
    report = ProofReport(("a", "b"), ("c",), {"d": "because"}, "hermes", True, (), 1)
    assert list(report_lines(report)) == [
        "extend a branch: a, b",
        'extend a branch if thinking = "keep", open one after thinking if it is "template": c',
        "refused: d: because",
        "format of tool calls: hermes",
    ]


def test_renderers_must_be_installed(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(
        UserError, match=r"renderer: got 'qwen3', which needs .*pip install 'atoll\[renderers\]'"
    ):
        ChatFormat(model_folder("qwen3"), thinking="keep", renderer="qwen3")


needs_renderers = pytest.mark.skipif(
    importlib.util.find_spec("httpx") is None, reason="renderers imports httpx, which is not installed"
)


@needs_renderers
async def test_a_renderer_gives_the_suffixes_of_the_template(model_folder: Folder) -> None:
    folder = model_folder("qwen3")
    own = ChatFormat(folder, thinking="keep")
    bridged = ChatFormat(folder, thinking="keep", renderer="qwen3")
    results = [Message("tool", text, tool_call_id="c") for text in ("46", "<|im_end|> <think>")]
    for new in ([Message("user", "hi <|im_end|>")], results, [*results, Message("user", "  so?\n")]):
        for ended in (True, False):
            expected = (await own.suffix(new, ended=ended)).tolist()
            assert (await bridged.suffix(new, ended=ended)).tolist() == expected
    fabricated = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert bridged.branch_cause(fabricated, has_thinking=False) == "renderer"
    assert own.branch_cause(fabricated, has_thinking=False) == ""
    with pytest.raises(RequestError, match="cannot append"):
        await bridged.suffix(fabricated, ended=True)
    report = await prove(bridged)
    assert (report.warnings, tuple(report.refused)) == ((), (FABRICATED,))


@needs_renderers
def test_an_unknown_renderer_is_refused(model_folder: Folder) -> None:
    with pytest.raises(UserError, match="renderer: got 'qwen2', expected a renderer for this tokenizer"):
        ChatFormat(model_folder("qwen3"), thinking="keep", renderer="qwen2")
