"""Files of the user's own, of which a config names what they bind: `file.py:NAME`."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

from atoll.config.errors import ConfigError


def check_class(setting: str, name: str) -> None:
    """Raises ConfigError if the file cannot be read or defines no such class; it is not imported."""
    file, _, class_name = name.rpartition(":")
    where = f"{setting}: {Path(file).absolute()}"
    if not file.endswith(".py"):
        raise ConfigError(f"{setting} = {name!r}: expected file.py:Class of your own")
    try:
        module = ast.parse(Path(file).read_bytes())
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; paths are relative to the current folder") from None
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, or not in its encoding
        raise ConfigError(f"{where} is not valid Python: {error}") from None
    known = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    if class_name not in known:
        raise ConfigError(f"{where}: no class {class_name!r}; it defines {', '.join(known) or 'none'}")


def load_class(name: str) -> type[Any]:
    """Imports `file.py:Class`. Raises ConfigError if that fails or if it is no class."""
    found = load_user_object(name)
    if not isinstance(found, type):
        raise ConfigError(f"{name} does not fit: expected a class, got {type(found).__name__} {found!r}")
    return found


def load_user_object(name: str, source: bytes | None = None) -> Any:
    """What `file.py:NAME` binds. Raises ConfigError if the file cannot be imported, or does not bind it."""
    path, _, bound_name = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None  # a path ending in .py always has a loader
    module = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source or source_of(name), path, "exec"), vars(module))
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if bound_name not in vars(module):
        raise ConfigError(f"{path} has no function {bound_name!r}")
    return vars(module)[bound_name]


def source_of(name: str) -> bytes:
    """Content of the file of `file.py:function`."""
    path = name.rpartition(":")[0]
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{path}: {reason}; {name} is read from {Path.cwd()}") from error
