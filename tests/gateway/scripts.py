"""What scripted policies say, in the call formats of their families."""

import json
from collections.abc import Sequence

BROKEN = '{"name": "add", "arguments": {"a": 1'


def scripts(family: str, client: str) -> list[list[str]]:
    """Of the client's rows, reply by reply. Replies beyond a script's end repeat its last one."""
    if client == "mini_swe_agent":
        steps = [{"command": "ls  'a b'"}, {"command": "cat é"}, {"command": "submit"}]
        one, two, end = (_calls(family, "bash", part) for part in (steps[:1], steps[:2], steps[2:]))
        return [[f"I look.\n{one}" if family != "llama3.1" else one, one, two, end]]
    sums = [_calls(family, "add", [{"a": k, "b": 2 * k} for k in range(1, n + 1)]) for n in (1, 2, 3)]
    if client == "smolagents":
        return [[*sums, _calls(family, "final_answer", [{"answer": "46"}])]]
    loop = [_thinking(family) + sums[0], sums[1], "It is 3.", sums[2], _odd(family), "11", "15"]
    plain = ["Three. ", '{"a":  3}', "46\n"]
    return [loop if family != "plain" else plain, [_thinking(family) + "3", _odd(family) + "\n", "46"]]


def _calls(family: str, name: str, arguments: Sequence[object]) -> str:
    key = "parameters" if family == "llama3.1" else "arguments"
    texts = [f'{{"name":"{name}",  "{key}": {json.dumps(each)}}}' for each in arguments]
    if family == "llama3.1":
        return "; ".join(texts)
    if family == "plain":
        return "\n".join(texts)
    return "\n".join(f"<tool_call>\n{text} \n</tool_call>" for text in texts)


def _thinking(family: str) -> str:
    return "<think>\nAdd, then\n\n say.\n</think>\n\n" if family.startswith("qwen3") else ""


def _odd(family: str) -> str:
    """Text that almost is a call."""
    return f"<tool_call>{BROKEN}</tool_call> é 𝟛" if family.startswith("qwen") else f"No: {BROKEN}"
