"""Named fixes for requests of particular clients. They change text, so a run turns them on by name."""

from collections.abc import Callable
from typing import Final

from atoll.wire.types import Message

Messages = tuple[Message, ...]

_BILLING: Final = "x-anthropic-billing-header:"


def apply_rules(rules: frozenset[str], messages: Messages) -> tuple[Messages, list[str]]:
    """The messages as the chosen rules leave them, and the names of those that changed something. Raises
    KeyError for a rule that does not exist."""
    applied = []
    for rule in sorted(rules):
        changed = RULES[rule](messages)
        if changed is not messages:
            applied.append(rule)
            messages = changed
    return messages, applied


def _drop_billing_header(messages: Messages) -> Messages:
    """Claude Code begins its system text with a line that may change with every request."""
    if not messages or messages[0].role != "system" or not messages[0].content.startswith(_BILLING):
        return messages
    _, _, rest = messages[0].content.partition("\n")
    return (messages[0]._replace(content=rest), *messages[1:]) if rest else messages[1:]


def _fold_system(messages: Messages) -> Messages:
    """System messages in mid-conversation, which many templates refuse, become the beginning of the user
    message right after them, or one of their own. Later requests fold the same way."""
    first = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    if not any(message.role == "system" for message in messages[first:]):
        return messages
    folded, pending = list(messages[:first]), list[str]()
    for message in messages[first:]:
        if message.role == "system":
            pending.append(message.content)
            continue
        if pending and message.role == "user":
            message = message._replace(content="\n".join([*pending, message.content]))
        elif pending:
            folded.append(Message("user", "\n".join(pending)))
        pending.clear()
        folded.append(message)
    if pending:
        folded.append(Message("user", "\n".join(pending)))
    return tuple(folded)


RULES: Final[dict[str, Callable[[Messages], Messages]]] = {
    "billing_header": _drop_billing_header,
    "fold_system": _fold_system,
}
