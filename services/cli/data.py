"""`atoll data`: builds the data sets, tokenizers and small models of the examples."""

import argparse
from pathlib import Path

from atoll.cli.examples import EXAMPLES

SAMPLE = EXAMPLES / "data" / "gsm8k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    arithmetic = tasks.add_parser("arithmetic", help="sums, for a model with one million parameters")
    arithmetic.add_argument(
        "--digits", type=int, choices=range(1, 7), default=2, help="digits of each number"
    )
    gsm8k = tasks.add_parser("gsm8k", help="grade-school maths, for a small model")
    gsm8k.add_argument(
        "--source",
        type=Path,
        default=SAMPLE,
        help="folder with GSM8K's train.jsonl and test.jsonl (default: %(default)s)",
    )
    tasks.add_parser("tools", help="sums with a tool that adds, for a model with one million parameters")
    tasks.add_parser("coding", help="broken functions, for an agent that edits files and runs tests")
    tasks.add_parser("guess", help="games of an environment server, for a model with one million parameters")
    for name, task in tasks.choices.items():
        task.add_argument("--out", type=Path, default=Path("runs/data") / name, help="folder (%(default)s)")
        task.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split")


def run(arguments: argparse.Namespace) -> int:
    if arguments.task == "arithmetic":
        from atoll.cli.tasks.arithmetic import build_arithmetic

        build_arithmetic(arguments.out, arguments.seed, arguments.digits)
    elif arguments.task == "tools":
        from atoll.cli.tasks.tools import build_tools

        build_tools(arguments.out, arguments.seed)
    elif arguments.task == "coding":
        from atoll.cli.tasks.coding import build_coding

        build_coding(arguments.out, arguments.seed)
    elif arguments.task == "guess":
        from atoll.cli.tasks.guess import build_guess

        build_guess(arguments.out, arguments.seed)
    else:
        from atoll.cli.tasks.gsm8k import build_gsm8k

        build_gsm8k(arguments.source, arguments.out, arguments.seed)
    for path in sorted(arguments.out.iterdir()):
        print(path)
    return 0
