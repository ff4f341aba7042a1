"""The renderer against transformers, and its refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import read_spec
from atoll.runtime.rendering import Renderer, as_template_message
from atoll.wire.types import Message, ToolCall
from tests.conftest import write_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# what templates in the wild use beyond that: namespaces, loop controls, tojson, BOS, generation marks, blocks
ELABORATE = """{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{% for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {% generation %}[{{ message.role }}] {{ message.content | trim }}{% endgeneration %}
{% endfor %}
{{ {"last": ns.last, "text": "<é>"} | tojson }}{{ dict(a=1).a }}{{ eos_token }}
{%- if add_generation_prompt %}[assistant] {% endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "12+34="}],
    [{"role": "system", "content": "be terse"}, {"role": "user", "content": "  what is 2 * (3-1)?  "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c <pad> d"},
    ],
]


def model_folder(folder: Path, vocab_size: int = 64, **tokenizer_config: object) -> Path:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": 1}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))
    return folder


@pytest.mark.parametrize("template", [CHATML, ELABORATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("place", ["tokenizer_config", "named list", "jinja file"])
def test_renders_and_tokenizes_as_transformers(tmp_path: Path, template: str, place: str) -> None:
    from transformers import AutoTokenizer

    model_folder(tmp_path, bos_token={"content": "<unk>", "__type": "AddedToken"})
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if place == "jinja file":
        (tmp_path / "chat_template.jinja").write_text(template)
        settings["chat_template"] = "the file wins over this"
    elif place == "named list":
        settings["chat_template"] = [
            {"name": "tool_use", "template": "not this"},
            {"name": "default", "template": template},
        ]
    else:
        settings["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    reference = AutoTokenizer.from_pretrained(tmp_path)
    renderer = Renderer(tmp_path)
    texts = [renderer.render(messages) for messages in CONVERSATIONS]
    for messages, text, ids in zip(CONVERSATIONS, texts, renderer.encode_prompts(texts), strict=True):
        assert text == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids.tolist() == expected


# tools, calls and their answers as Qwen's templates have them
WITH_TOOLS = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SUM = {
    "type": "function",
    "function": {
        "name": "sum",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_tools_and_their_calls_are_rendered_as_by_transformers(
    tmp_path: Path, add_generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    folder = model_folder(tmp_path, chat_template=WITH_TOOLS)
    conversation = [
        Message("user", "12+34="),
        Message("assistant", "", (ToolCall("c1", "sum", '{"a": 12, "text": "<é>"}'),)),
        Message("tool", "46", tool_call_id="c1"),
    ]
    messages = [as_template_message(message) for message in conversation]
    text = Renderer(folder).render(messages, [SUM], add_generation_prompt=add_generation_prompt)
    assert text == AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=[SUM], add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert '{"name": "sum", "arguments": {"a": 12, "text": "<é>"}}' in text
    assert text.endswith("assistant\n") == add_generation_prompt


def test_arguments_that_are_no_object_stay_text() -> None:
    for text in ("not json", "[1]", "3"):
        message = as_template_message(Message("assistant", "", (ToolCall("c", "f", text),)))
        assert message["tool_calls"][0]["function"]["arguments"] == text


def test_plain_text_without_a_template(tmp_path: Path) -> None:
    renderer = Renderer(model_folder(tmp_path))
    assert renderer.render(CONVERSATIONS[1]) == "be terse  what is 2 * (3-1)?  "
    # characters are numbered from 3 in the order of tests/conftest.py: digits first, + is 13, = is 17
    (ids,) = renderer.encode_prompts(["12+34="])
    assert ids.tolist() == [4, 5, 13, 6, 7, 17]
    (encoding,) = renderer.encode_parts(["46"], are_first=False)
    assert (encoding.ids, encoding.offsets) == ([7, 9], [(0, 1), (1, 2)])


def test_plain_text_gets_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    model_folder(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    tokenizer.enable_truncation(3)  # must not cut a prompt
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    renderer = Renderer(tmp_path)
    assert [ids.tolist() for ids in renderer.encode_prompts(["1234", "5"])] == [[2, 4, 5, 6, 7], [2, 8]]
    parts = [renderer.encode_parts(["12"], are_first=is_first)[0].ids for is_first in (True, False)]
    assert parts == [[2, 4, 5], [4, 5]]


def test_stop_ids_come_from_all_three_files(tmp_path: Path) -> None:
    model_folder(tmp_path, vocab_size=70)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 70, "eos_token_id": 69}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [68, 69]}))
    renderer = Renderer(tmp_path)
    assert renderer.eos_id == 1  # "<eos>" of tokenizer_config.json ends what we teach
    assert renderer.stop_ids == (1, 68, 69)


def test_digest_tells_tokenizers_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = Renderer(model_folder(tmp_path / "a")), Renderer(model_folder(tmp_path / "b"))
    assert a.digest == b.digest
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace('"0"', '"O"'))
    assert Renderer(tmp_path / "b").digest != a.digest


def test_a_template_with_a_syntax_error_is_named_with_its_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, chat_template="{% for m in messages %}\n{{ m.content ")
    with pytest.raises(
        UserError, match=rf"{folder}: line 2 of the chat template is not valid Jinja: unexpected end of"
    ):
        Renderer(folder)


def test_a_template_may_refuse_and_cannot_reach_out(tmp_path: Path) -> None:
    refuses = Renderer(model_folder(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        refuses.render(CONVERSATIONS[0])
    escapes = Renderer(model_folder(tmp_path, chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(jinja2.exceptions.SecurityError):
        escapes.render(CONVERSATIONS[0])


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: missing; write it with transformers"):
        Renderer(tmp_path)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: missing; expected a Hugging Face folder with config"):
        Renderer(tmp_path)


@pytest.mark.parametrize("read", [Renderer, read_spec])
def test_an_id_of_the_hub_is_answered_with_the_command(read: Callable[[Path], object]) -> None:
    with pytest.raises(UserError) as raised:
        read(Path("Qwen/Qwen2.5-0.5B-Instruct"))
    assert str(raised.value).splitlines()[1:] == [
        "  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct",
        "or, from ModelScope,",
        "  modelscope download --model Qwen/Qwen2.5-0.5B-Instruct --local_dir models/Qwen2.5-0.5B-Instruct",
        'and set path = "models/Qwen2.5-0.5B-Instruct"',
    ]


def test_a_tokenizer_that_is_too_large_for_the_model(tmp_path: Path) -> None:
    # tests/conftest.py's last character is "z" with id 49
    with pytest.raises(UserError, match=r"token 'z' has id 49, expected ids below the model's vocab_size 49"):
        Renderer(model_folder(tmp_path, vocab_size=49))
    Renderer(model_folder(tmp_path, vocab_size=50))


def test_a_stop_id_outside_the_vocabulary(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "generation_config.json").write_text('{"eos_token_id": 64}')
    with pytest.raises(UserError, match=r"got end-of-sequence ids \[1, 64\], expected .* vocabulary of 64"):
        Renderer(tmp_path)


def test_a_model_without_end_of_sequence(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no end-of-sequence token"):
        Renderer(tmp_path)
