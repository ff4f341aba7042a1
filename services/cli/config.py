"""`atoll config FILE`: resolves a config as `atoll run` does, without starting anything."""

import argparse
from pathlib import Path

from atoll.cli.compare import differences
from atoll.config.load import load, read_json, write_resolved
from atoll.config.schema import RunConfig
from atoll.runtime.errors import UserError
from atoll.runtime.gpus import resolve_for_others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the run's config in TOML, such as examples/arithmetic.toml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write it, such as runs/NAME/config.json; default: print it",
    )


def run(arguments: argparse.Namespace) -> int:
    config = resolve_for_others(load(arguments.file, arguments.set))
    if arguments.out is None:
        print(config.model_dump_json(indent=2))
    else:
        write(config, arguments.out)
    return 0


def write(config: RunConfig, path: Path) -> None:
    """Replaces the config of an earlier start of the same run and prints what has changed; an equal one is
    left alone. Raises UserError if the file is another run's."""
    new = config.model_dump(mode="json")
    if path.exists():
        old = read_json(path)
        name = old.get("run", {}).get("name")
        if name != config.run.name:
            raise UserError(
                f"{path} is the config of run {name!r}, expected {config.run.name!r}: write to another file, "
                "or delete this one"
            )
        changes = differences(old, new)
        if not changes:
            print(f"{path} is up to date")
            return
        print(
            "\n".join(["settings that differ from the last start:", *(f"  {change}" for change in changes)])
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_resolved(config, path)
    print(f"wrote {path}")
