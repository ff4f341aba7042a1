"""`atoll samples`: prints prompts, answers and rewards of a step or of a validation."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from atoll.cli.launch import active_runs
from atoll.config.schema import ConsoleSection
from atoll.coordinator.control import RunState
from atoll.runtime.errors import AtollError
from atoll.runtime.samples import Sample, SampleTurn, read_samples
from atoll.wire.info import RunStatus

SHOWN = 3  # samples, if not told
NOT_TRAINING = (RunState.STARTING.value, RunState.WARMING_UP.value)  # whose steps are others
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 600, 1200  # longer texts lose their middle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="default: the last step that has samples")
    parser.add_argument("--set", metavar="NAME", help="show the answers to this validation set")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest scores first")
    order.add_argument("--best", action="store_true", help="highest scores first")
    parser.add_argument("-n", "--num", type=int, help=f"samples to print; default: {SHOWN}, with --jsonl all")
    parser.add_argument("--jsonl", action="store_true", help="print each sample in full, as a line of JSON")


def run(arguments: argparse.Namespace) -> int:
    samples = read_samples(arguments.run, arguments.step, arguments.set)
    chosen = sorted(samples, key=_order(arguments.worst, arguments.best))
    if arguments.jsonl:
        try:
            for sample in chosen[: arguments.num]:
                print(orjson.dumps(sample).decode())
        except BrokenPipeError:  # `head` has read enough; what is left to flush has no reader either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print_samples(Console(), samples, chosen[: SHOWN if arguments.num is None else arguments.num])
    return 0


def _order(worst: bool = False, best: bool = False) -> Callable[[Sample], float]:
    """By default one sample of each group, then another of each."""
    if worst or best:
        return lambda sample: sample.score if worst else -sample.score
    return lambda sample: sample.index


def print_samples(console: Console, samples: Sequence[Sample], chosen: Sequence[Sample]) -> None:
    """`chosen`, below a line about all `samples`."""
    scores = [sample.score for sample in samples]
    what = f"validation set {samples[0].set}" if samples[0].set else "training"
    console.print(
        f"step {samples[0].step}, {what}: {len(chosen)} of {len(samples)} samples; score "
        f"{sum(scores) / len(scores):.3f} on average, {min(scores):g} to {max(scores):g}",
        highlight=False,
        markup=False,
    )
    for sample in chosen:
        console.print(Rule(Text(f"{sample.id}   score {sample.score:g}", "bold"), align="left"))
        console.print(_describe(sample))


def _describe(sample: Sample) -> Table:
    """Texts are the model's: nothing in them is markup or moves the cursor."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def add(label: str, text: str, limit: int | None = None) -> None:
        if text:
            table.add_row(label, Text(_printable(_shorten(text, limit) if limit else text)))

    if not sample.turns[0].context:  # which has the prompt as the agent sent it
        add("prompt", sample.prompt, PROMPT_CHARACTERS)
    is_dialogue = len(sample.turns) > 1
    for number, turn in enumerate(sample.turns):
        if is_dialogue:
            add(f"turn {number}", _about_turn(turn))
        add("context", turn.context, PROMPT_CHARACTERS)
        add("response", turn.response, RESPONSE_CHARACTERS)
    add("truth", sample.ground_truth, PROMPT_CHARACTERS)
    for name, value in sample.components.items():
        reason = sample.reasons.get(name)
        add("reward", f"{name} {value:g}{f': {reason}' if reason else ''}")
    end = sample.reason or sample.finish_reason
    kind = ["greedy baseline"] if sample.is_baseline else []
    add("details", ", ".join([_produced(sample), end, *kind]))
    return table


def _about_turn(turn: SampleTurn) -> str:
    facts = [_produced(turn), turn.finish_reason]
    if turn.after is not None:
        facts.insert(0, f"after turn {turn.after}")
    if turn.reward:
        facts.append(f"reward {turn.reward:g}")
    if not turn.trained:
        facts.append("not trained on")
    return ", ".join(facts)


def _produced(what: Sample | SampleTurn) -> str:
    label = "version" if len(what.versions) == 1 else "versions"
    return f"{what.num_tokens} tokens, {label} {', '.join(map(str, what.versions)) or 'none'}"


def _shorten(text: str, limit: int) -> str:
    """The beginning and the end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _printable(text: str) -> str:
    """Control characters as their escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class SamplePrinter:
    """Prints samples while a run is followed, in a thread."""

    def __init__(self, folder: Path, section: ConsoleSection) -> None:
        self._folder = folder
        self._section = section
        self._last: int | None = None  # the step printed last, or the one that the run began with
        self.printing: asyncio.Future[None] | None = None

    def show(self, status: RunStatus) -> None:
        """Starts to print if `section.every` steps have passed and the last print is finished."""
        if not self._section.samples or status.state in NOT_TRAINING:
            return
        if self._last is None:
            self._last = status.step
        is_due = status.step // self._section.every > self._last // self._section.every
        if is_due and (self.printing is None or self.printing.done()):
            self._last = status.step
            self.printing = asyncio.get_running_loop().run_in_executor(None, self._print, status.step)

    def _print(self, step: int) -> None:
        try:
            samples = read_samples(self._folder, step)
        except (AtollError, OSError) as error:  # no reason to end a run
            print(f"no samples of step {step}: {error}")
            return
        console = Console()
        with console.capture() as capture:
            print_samples(console, samples, sorted(samples, key=_order())[: self._section.samples])
        print(capture.get(), end="")  # a live display shows what is printed above it, but not other consoles'
