"""Reads TOML, applies overrides, returns a frozen RunConfig. The only reader of os.environ."""

import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from atoll.config import functions
from atoll.config.errors import ConfigError
from atoll.config.rules import violations
from atoll.config.schema import GraderConfig, RunConfig

Tree = dict[str, typing.Any]

_FUNCTIONS = {
    kind.setting for kind in (functions.ADVANTAGE, functions.LOSS, functions.FILTER, functions.REWEIGHT)
}


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a TOML file and applies overrides of the form "a.b=value" (TOML values; bare words are strings).

    A file may extend another one, by a path relative to itself: `base = "arithmetic.toml"`.
    Raises ConfigError naming every wrong key, with the nearest known one.
    """
    tree = _read(path, ())
    for override in overrides:
        _apply(tree, override)
    return validate(tree, str(path))


def load_grader(name: str, overrides: Sequence[str] = ()) -> GraderConfig:
    """A grader outside of any run, with overrides of its parameters and settings. Raises ConfigError."""
    tree: Tree = {"name": name}
    for override in overrides:
        _apply(tree, override)
    try:
        return GraderConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error))) from None


def read_resolved(path: Path) -> RunConfig:
    """Reads the JSON written by `write_resolved`."""
    return validate(read_json(path), str(path), is_resolved=True)


def read_json(path: Path) -> Tree:
    """An object that a run wrote. Raises ConfigError."""
    try:
        tree: Tree = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}; the run that wrote it was cut off") from None
    return tree


def flatten(tree: Mapping[str, typing.Any], place: str = "") -> Iterator[tuple[str, typing.Any]]:
    """The values of a tree by their dotted names; a list counts as one value."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def validate(tree: Tree, source: str, *, is_resolved: bool = False) -> RunConfig:
    """The config that `tree` holds; errors name its `source`. `is_resolved`: as in `violations`.

    Raises ConfigError with every wrong key or, if all are right, every rule that they break together.
    """
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        sentences = _sentences(error)
    else:
        sentences = violations(config, is_resolved=is_resolved)
        if not sentences:
            return config
    lines = "\n".join(sentences).splitlines()
    raise ConfigError("\n".join(f"{source}: {line}" for line in lines))


def write_resolved(config: RunConfig, path: Path) -> None:
    write_private(path, config.model_dump_json(indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replaces the file by one that only its owner can read."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # which would keep its permissions
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


TOKEN: typing.Final = "ATOLL_TOKEN"
OPERATOR_TOKEN: typing.Final = "ATOLL_OPERATOR_TOKEN"


def access_token() -> str:
    """The run's token, shared by all services and their callers. Raises ConfigError if it is not set."""
    token = optional_token(TOKEN)
    if token is None:
        raise ConfigError(
            f"the environment variable {TOKEN} is not set: `atoll run` sets it for its services; to start "
            "one by hand, set it to the secret of the run's other services"
        )
    return token


def optional_token(variable: str) -> str | None:
    """None if it is not set. Raises ConfigError if it is empty, as when a compose file passes on an unset
    variable."""
    token = os.environ.get(variable)
    if token is not None and not token.strip():
        raise ConfigError(
            f"the environment variable {variable} is empty, expected a secret such as the output of "
            "`openssl rand -hex 32`: set it or unset it"
        )
    return token


def withhold_tokens() -> None:
    """Takes the run's tokens out of the environment, which programs started from now on inherit."""
    for variable in (TOKEN, OPERATOR_TOKEN):
        os.environ.pop(variable, None)


def bypass_proxies_on_loopback() -> None:
    """From now on, HTTP clients in this process and its children ignore `http_proxy` and the like for
    loopback addresses: SGLang's server asks itself, agents ask a gateway."""
    given = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if given.strip() != "*":  # all hosts, if nothing else is listed
        given = ",".join(filter(None, (given, "localhost", "127.0.0.1", "::1")))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = given


PLAIN_VARIABLES: typing.Final = frozenset(
    ("PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "SHELL", "no_proxy", "NO_PROXY")
)


def plain_environment() -> dict[str, str]:
    """Variables for programs that may get none of this process's secrets."""
    return {
        name: value for name, value in os.environ.items() if name in PLAIN_VARIABLES or name.startswith("LC_")
    }


def secret(reference: str) -> str:
    """The secret that "env:VARIABLE" refers to. Raises ConfigError if the variable is not set."""
    variable = reference.removeprefix("env:")
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"the environment variable {variable} is not set: set it before starting `atoll run`, whose "
            "services inherit its environment"
        )
    return value


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user has set it: "" hides all GPUs; None: not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def set_environment(variables: Mapping[str, str]) -> None:
    """For libraries of this process that read them later."""
    os.environ.update(variables)


def torchrun_place() -> tuple[int, int] | None:
    """The number of this host and of this process on it; None: torchrun did not start this process."""
    if "GROUP_RANK" not in os.environ:
        return None
    return int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])


def trainer_rank() -> int:
    """This process's rank in the trainer fleet, as torchrun and the launcher set it."""
    try:
        return int(os.environ["RANK"])
    except KeyError:
        raise ConfigError(
            "RANK is not set: start trainer ranks with `atoll run`, or by hand with RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, as torchrun does"
        ) from None


WORKER_SOCKETS: typing.Final = "ATOLL_WORKER_SOCKETS"


def worker_sockets() -> Path:
    """Folder for the sockets of the receivers inside an SGLang server, as set by the rollout service."""
    return Path(os.environ[WORKER_SOCKETS])


def _read(path: Path, derived: tuple[Path, ...]) -> Tree:
    """The file's tables, merged over those of its base. `derived`: files that led to this one."""
    try:
        tree = tomllib.loads(_text(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; `atoll examples` writes some") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base = {base!r}, expected the path of another config file")
    chain = (*derived, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise ConfigError(f"{path}: base = {base!r} is circular: that file is based on this one")
    return _merge(_read(path.parent / base, chain), tree)


def _text(path: Path) -> str:
    """Raises ConfigError if it is no file of text that can be read, FileNotFoundError if it is missing."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}: save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a file that you can read") from None


def _merge(old: Tree, new: Tree, place: str = "") -> Tree:
    """Merges `new` over `old`, table by table; lists are replaced. A table with a function's name replaces
    the old parameters; one without a name adds to them.
    """
    merged = dict(old)
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, str):
            before = {"name": before}
        is_other_function = f"{place}{key}" in _FUNCTIONS and isinstance(value, dict) and "name" in value
        if isinstance(value, dict) and isinstance(before, dict) and not is_other_function:
            merged[key] = _merge(before, value, f"{place}{key}.")
        else:
            merged[key] = value
    return merged


def _apply(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, leaf = key.strip().split(".")
    for table in tables:
        below = tree.setdefault(table, {})
        if isinstance(below, str):  # a function's name instead of a table
            below = tree[table] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override}: {table} is not a table")
        tree = below
    tree[leaf] = value


def _sentences(error: ValidationError) -> list[str]:
    return [
        _explain(problem["type"], problem["loc"], problem["msg"], problem.get("input"))
        for problem in error.errors()
    ]


def _explain(kind: str, location: tuple[int | str, ...], message: str, got: object) -> str:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if kind == "missing":
        return f"{key}: required and missing"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{key}: {message}, got {got!r}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for step in location:
        if isinstance(step, int):
            continue  # element of a list of tables
        candidates = [
            section.model_fields[step].annotation,
            *typing.get_args(section.model_fields[step].annotation),
        ]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(section.model_fields)
