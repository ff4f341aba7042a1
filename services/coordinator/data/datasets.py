"""Prompt sources: weighted datasets, shuffled per epoch, resumable at any draw."""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from atoll.config.schema import TokenLimit
from atoll.coordinator.data.conversations import SupervisedSequence, encode_rows, render_messages
from atoll.coordinator.data.dataset_files import row_error
from atoll.coordinator.data.dataset_rows import (
    AGENT_FIELDS,
    Dataset,
    DatasetRow,
    read_rows,
    read_supervised_rows,
)
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Renderer
from atoll.wire.types import GroupId, Int32, Int64, Prompt

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the infinite sequence of draws: `drawn` is the state, the rest identifies the
    sequence.
    """

    seed: int
    shuffle: bool
    rows: tuple[int, ...]  # rows per source, without over-long ones
    drawn: tuple[int, ...]  # from each source since the run began
    digests: tuple[str, ...] = ()  # digest of each source's rows, as the model sees them

    def dump(self) -> str:
        """JSON that `parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        tree = json.loads(text)
        rows, drawn, digests = (tuple(tree[name]) for name in ("rows", "drawn", "digests"))
        return cls(tree["seed"], tree["shuffle"], rows, drawn, digests)

    def changes(self, other: "Cursor") -> list[str]:
        """Differences of `other`'s sequence from this one."""
        named = (
            (f"run.seed is {other.seed}, not {self.seed}", other.seed != self.seed),
            (f"data.shuffle is {other.shuffle}, not {self.shuffle}", other.shuffle != self.shuffle),
            (
                f"the datasets have {list(other.rows)} rows that are short enough, not {list(self.rows)}",
                other.rows != self.rows,
            ),
        )
        changes = [what for what, differs in named if differs]
        if not changes and other.digests != self.digests:
            changes.append("the datasets have the same number of rows as before, but different ones")
        return changes


class Mixture:
    """The order in which rows of several sources are drawn.

    Each draw goes to the source furthest behind its share, so shares hold at all times and not only on
    average. A source's draws walk a permutation of its rows, another one each epoch, that depends on (seed,
    source, epoch) alone: the counts of the cursor restore it.
    """

    def __init__(
        self,
        rows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: bool,
        digests: Sequence[str] = (),
    ) -> None:
        self.cursor = Cursor(seed, shuffle, tuple(rows), tuple(0 for _ in rows), tuple(digests))
        self._shares = [weight / sum(weights) for weight in weights]
        self._orders: dict[int, tuple[int, Int64]] = {}  # of each source: epoch, permutation

    def draw(self, n: int) -> list[tuple[int, int, int]]:
        """The next n draws as (source, epoch, row)."""
        draws = []
        drawn = list(self.cursor.drawn)
        for total in range(sum(drawn) + 1, sum(drawn) + n + 1):
            behind = [share * total - count for share, count in zip(self._shares, drawn, strict=True)]
            source = behind.index(max(behind))
            epoch, position = divmod(drawn[source], self.cursor.rows[source])
            draws.append((source, epoch, int(self._order(source, epoch)[position])))
            drawn[source] += 1
        self.cursor = replace(self.cursor, drawn=tuple(drawn))
        return draws

    def load(self, cursor: Cursor) -> None:
        """Continues at `cursor`. Raises UserError if it belongs to another sequence."""
        if changes := cursor.changes(self.cursor):
            raise UserError(
                f"cannot resume the data: {'; '.join(changes)}; restore the run's original data and "
                "settings, or start a new run"
            )
        self.cursor = cursor

    def _order(self, source: int, epoch: int) -> Int64:
        cached_epoch, order = self._orders.get(source, (-1, np.empty(0, np.int64)))
        if cached_epoch != epoch:
            order = np.arange(self.cursor.rows[source])
            if self.cursor.shuffle:
                order = np.random.default_rng([self.cursor.seed, source, epoch]).permutation(order)
            self._orders[source] = epoch, order
        return order


class PromptSource:
    """Training prompts. Everything is rendered, tokenized and checked here, once; draws are cheap.

    A prompt's number counts the rows of all sources in their order, including over-long ones, so it
    identifies a row permanently. Its epoch counts earlier draws of that row.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        renderer: Renderer,
        *,
        run: str,
        seed: int,
        shuffle: bool,
        longest: TokenLimit,
        overlong: Literal["filter", "refuse"],
    ) -> None:
        """`weights`: of each dataset. `longest`: of a prompt. Raises UserError that names file, row and field
        of the first bad row."""
        self._run = run
        self._sources: list[list[Prompt]] = []
        first = 0
        for dataset in datasets:
            prompts = read_prompts(dataset, renderer, run, first)
            first += len(prompts)
            self._sources.append(drop_overlong_prompts(dataset.path, prompts, longest, overlong))
        self._by_number = {prompt.id.prompt: prompt for prompts in self._sources for prompt in prompts}
        self._mixture = Mixture(
            [len(prompts) for prompts in self._sources],
            weights,
            seed,
            shuffle,
            [_digest(map(_identity, prompts)) for prompts in self._sources],
        )

    @property
    def cursor(self) -> Cursor:
        return self._mixture.cursor

    def load(self, cursor: Cursor) -> None:
        """The next draw is the one that followed when `cursor` was taken."""
        self._mixture.load(cursor)

    def prompt(self, id: GroupId) -> Prompt:
        """The prompt with this id."""
        return replace(self._by_number[id.prompt], id=id)

    def draw(self, n: int) -> list[Prompt]:
        prompts = []
        for source, epoch, row in self._mixture.draw(n):
            prompt = self._sources[source][row]
            if epoch:
                prompt = replace(prompt, id=GroupId(self._run, epoch, prompt.id.prompt))
            prompts.append(prompt)
        return prompts


class SupervisedSource:
    """Rows with answers to learn, one draw per sequence. Everything is checked before."""

    def __init__(
        self, rows: Sequence[Sequence[SupervisedSequence]], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        """`rows` and `weights`: of each source."""
        self._rows = rows
        digests = [_digest(map(_turns, sequences)) for sequences in rows]
        self._mixture = Mixture([len(sequences) for sequences in rows], weights, seed, shuffle, digests)

    @property
    def cursor(self) -> Cursor:
        return self._mixture.cursor

    def load(self, cursor: Cursor) -> None:
        """The next draw is the one that followed when `cursor` was taken."""
        self._mixture.load(cursor)

    def draw(self, n: int) -> list[SupervisedSequence]:
        return [self._rows[source][row] for source, _, row in self._mixture.draw(n)]


def _turns(sequence: SupervisedSequence) -> list[Int32]:
    """Token ids of what is given, then learned, given, learned, and so on."""
    ids, mask = sequence
    return np.split(ids, np.flatnonzero(mask[1:] != mask[:-1]) + 1)


def _identity(prompt: Prompt) -> Iterator[Int32 | str]:
    """What makes a row another one."""
    yield prompt.text if prompt.agent else prompt.token_ids
    yield prompt.ground_truth
    yield prompt.data_source
    if prompt.agent:
        yield from (prompt.extra[name] for name in AGENT_FIELDS if name in prompt.extra)


def _digest(rows: Iterable[Iterable[Int32 | str]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        for part in row:
            content = part.encode() if isinstance(part, str) else part.tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def read_prompts(dataset: Dataset, renderer: Renderer, run: str, first: int = 0) -> list[Prompt]:
    """All rows of a dataset as prompts of epoch 0, numbered from `first`. Those for an agent have messages
    and no tokens: what the policy sees is what the agent sends.

    Raises UserError that names file, row and field.
    """
    rows, agent = read_rows(dataset), dataset.agent
    texts = [_render(dataset.path, number, row, renderer) for number, row in enumerate(rows)]
    ids = [np.empty(0, np.int32)] * len(rows) if agent else _encode(dataset.path, texts, renderer)
    return [
        Prompt(
            id=GroupId(run, 0, first + number),
            token_ids=token_ids,
            text=text,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            extra=row.extra,
            agent=agent,
            messages=tuple(row.messages) if agent else (),
        )
        for number, (row, text, token_ids) in enumerate(zip(rows, texts, ids, strict=True))
    ]


def read_sequences(
    dataset: Dataset, renderer: Renderer, longest: TokenLimit, overlong: Literal["filter", "refuse"]
) -> list[SupervisedSequence]:
    """What is learned of the rows of a dataset; `longest`: of a sequence. Raises UserError that names file,
    row and field."""
    path, sequences, numbers = dataset.path, [], []
    for number, of_row in enumerate(encode_rows(path, read_supervised_rows(dataset), renderer)):
        sequences += of_row
        numbers += [number] * len(of_row)
    lengths = [len(sequence.token_ids) for sequence in sequences]
    return _drop_overlong(
        path, sequences, lengths, longest, overlong, "prompt and answers", "shorten it", numbers
    )


def _render(path: Path, number: int, row: DatasetRow, renderer: Renderer) -> str:
    try:
        return render_messages(row.messages, renderer)
    except ValueError as error:
        raise row_error(path, number, f"field prompt: {error}") from None


def _encode(path: Path, texts: Sequence[str], renderer: Renderer) -> list[Int32]:
    ids = renderer.encode_prompts(texts)
    for number, (text, token_ids) in enumerate(zip(texts, ids, strict=True)):
        if len(token_ids) == 0:
            raise row_error(path, number, f"field prompt: {text!r} has no token in this tokenizer")
    return ids


def drop_overlong_prompts(
    path: Path, prompts: Sequence[Prompt], longest: TokenLimit, overlong: Literal["filter", "refuse"]
) -> list[Prompt]:
    """Those of at most `longest` tokens. Raises UserError that names the longest of the others if none may be
    dropped or none would be left."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    numbers = range(len(prompts))
    return _drop_overlong(path, prompts, lengths, longest, overlong, "field prompt", "raise it", numbers)


def _drop_overlong(
    path: Path,
    rows: Sequence[T],
    lengths: Sequence[int],
    limit: TokenLimit,
    overlong: Literal["filter", "refuse"],
    what: str,
    advice: str,
    numbers: Sequence[int],
) -> list[T]:
    """As drop_overlong_prompts, for any rows. `numbers`: of the rows in their dataset."""
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit.tokens]
    total, dropped = len(rows), len(rows) - len(kept)
    if dropped and (overlong == "refuse" or not kept):
        longest, number = max(zip(lengths, numbers, strict=True), key=lambda item: item[0])
        raise row_error(
            path,
            number,
            f"{what}: got {longest} tokens (the longest of {dropped} over-long rows), expected at most "
            f'{limit.setting} = {limit.tokens}; {advice}, or set data.overlong_prompts = "filter"',
        )
    if dropped:
        log.warning("%s: left out %d of %d rows of more than %d tokens", path, dropped, total, limit.tokens)
    return kept
