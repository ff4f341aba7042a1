"""Functions named in a config: built-in ones by key, the user's own as `file.py:function`.

`check` validates name and parameters from the source code only, so that reading a config imports neither
torch nor the user's code. `load` imports the code once, when the service that calls it starts.

A parameter's range is part of its annotation: `lam: Annotated[float, Ge(0), Le(1)]`. A bound may be another
parameter, by name: `max_cov: Annotated[float, Gt("min_cov")]`. Numbers are finite.

This is the one upward dependency: a `FunctionKind` names files of the coordinator, the trainer and the reward
service, which are layers above this one, and no import says so. What is read there is a dict of functions,
their signatures, and beside the dict, in `TRAITS`, what a function asks of other settings.
"""

import ast
import difflib
import importlib.util
import inspect
import math
import operator
import symtable
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from atoll.config.errors import ConfigError
from atoll.config.user_files import load_user_object

PACKAGE = Path(__file__).parents[2]


Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """The interface of the functions of one setting: one positional parameter unless `takes_argument` is
    False, the others by keyword."""

    setting: str
    file: str  # file with the dict of built-in functions; "": there are none
    table: str  # its name
    signature: str
    traits: tuple[str, ...] = ()  # that one may have; their meaning is documented next to the dict
    is_async: bool = False
    takes_argument: bool | None = True  # None: any

    @property
    def keyword(self) -> str:
        return "async def" if self.is_async else "def"


class Named(Protocol):
    """A function as a config names it: schema.FunctionConfig."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


ADVANTAGE = FunctionKind(
    "algorithm.advantage",
    "atoll/coordinator/algorithm/advantage.py",
    "ADVANTAGES",
    "(trajectories: Trajectories, *, ...) -> Estimate",
    ("needs_values", "needs_baseline", "group_relative", "reads_components"),
)
LOSS = FunctionKind(
    "algorithm.loss",
    "atoll/trainer/losses/loss.py",
    "LOSSES",
    "(tokens: PolicyTokens, *, ...) -> tuple[Tensor, dict[str, Tensor]]",
    ("sequence_mean", "without_ratio"),
)
FILTER = FunctionKind(
    "algorithm.filter", "atoll/coordinator/algorithm/filters.py", "FILTERS", "(group: Group, *, ...) -> bool"
)
REWEIGHT = FunctionKind(
    "algorithm.reweight",
    "atoll/coordinator/algorithm/reweight.py",
    "REWEIGHTS",
    "(scores: NDArray, *, ...) -> NDArray",
)
GRADER = FunctionKind(
    "reward.graders",
    "atoll/reward/score.py",
    "GRADERS",
    "(item: ScoreItem, *, ...) -> float | Grade",
    ("needs_ground_truth", "needs_data_source"),
)
ROWS = FunctionKind("data.train", "", "", "(*, ...) -> Iterable[dict]", takes_argument=False)

AGENT = FunctionKind("agents.function", "", "", "(session: AgentSession) -> float | None", is_async=True)

TOOL = FunctionKind("agents.tools.functions", "", "", "(..., *, ...) -> object", takes_argument=None)


def is_users_own(name: str) -> bool:
    return ".py:" in name


def check(
    kind: FunctionKind, name: str, parameters: Mapping[str, object], settings: Collection[str] = ()
) -> None:
    """Raises ConfigError if there is no such function or it does not take `parameters`.

    `settings` are the other keys of the same table, for "did you mean".
    """
    if is_users_own(name):
        function = _users_definition(kind, name)
    elif not kind.file:
        raise ConfigError(f"{kind.setting} = {name!r}: expected file.py:function of your own")
    elif name in built_in(kind):
        function = built_in(kind)[name]
    else:
        near = difflib.get_close_matches(name, built_in(kind), n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"{kind.setting} = {name!r}: no such function; {hint}Known: {', '.join(built_in(kind))}, or "
            "file.py:function of your own"
        )
    if function is not None:
        _check_parameters(f"{kind.setting}: {name}", function.args, parameters, settings)


def check_server(name: str, parameters: Mapping[str, object]) -> None:
    """Checks a grader that calls external servers: `server:NAME`."""
    if not name.removeprefix("server:"):
        raise ConfigError(f"{GRADER.setting} = {name!r}: name the servers, as in server:judge")
    if parameters:
        raise ConfigError(
            f"{GRADER.setting}: {name} has no parameter {', '.join(parameters)}: set options of a server in "
            "its [[servers]] table, or with `atoll register`"
        )


@cache
def built_in(kind: FunctionKind) -> Mapping[str, Definition]:
    """A kind's built-in function definitions, by name."""
    module = ast.parse((PACKAGE / kind.file).read_bytes())
    table = _assigned(module, kind.table)
    assert isinstance(table, ast.Dict)
    definitions = _imports_of(module) | _functions_in(module)
    names = (ast.literal_eval(key) for key in table.keys if key is not None)
    return {name: definitions[ast.unparse(value)] for name, value in zip(names, table.values, strict=True)}


@cache
def traits(kind: FunctionKind) -> Mapping[str, Collection[str]]:
    """Those of a kind's built-in functions, by name; a function that is not there has none."""
    table = _assigned(ast.parse((PACKAGE / kind.file).read_bytes()), "TRAITS")
    return {} if table is None else ast.literal_eval(table)


def load(
    config: Named, known: Mapping[str, Callable[..., Any]], source: bytes | None = None
) -> Callable[..., Any]:
    """Loads the function named by `config`, built in (`known`) or the user's own, with its parameters bound.

    `source`: content of the user's file, if it must not be read again.
    """
    if not is_users_own(config.name):
        return partial(known[config.name], **config.parameters)
    function = load_user_function(config.name, source)
    try:
        inspect.signature(function).bind(object(), **config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"{config.name} does not fit: {error}; expected one positional parameter, and by keyword "
            f"{', '.join(config.parameters) or 'none'}, got {inspect.signature(function)}"
        ) from None
    return partial(function, **config.parameters)


def load_user_function(
    name: str, source: bytes | None = None, *, is_async: bool = False
) -> Callable[..., Any]:
    """Imports `file.py:function`. Raises ConfigError if that fails or if it is not a plain function or, with
    `is_async`, an async one."""
    function: Callable[..., Any] = load_user_object(name, source)
    if not callable(function) or inspect.iscoroutinefunction(function) is not is_async:
        expected, other = ("an async", "a plain") if is_async else ("a plain", "an async")
        got = f"{other} function" if callable(function) else f"{type(function).__name__} {function!r}"
        raise ConfigError(f"{name} does not fit: expected {expected} function, got {got}")
    return function


def _users_definition(kind: FunctionKind, name: str) -> Definition | None:
    """The `def` of `file.py:function`; None if the file binds the name in another way."""
    file, _, function_name = name.rpartition(":")
    where = f"{kind.setting}: {Path(file).absolute()}"
    try:
        source = importlib.util.decode_source(Path(file).read_bytes())
        module = ast.parse(source)
        symbols = symtable.symtable(source, file, "exec").get_identifiers()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; paths are relative to the current folder") from None
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, or not in its encoding
        raise ConfigError(f"{where} is not valid Python: {error}") from None
    if function_name not in symbols:
        known = ", ".join(_functions_in(module)) or "none"
        raise ConfigError(f"{where}: no function {function_name!r}; it defines {known}")
    expected = f"{kind.keyword} {function_name}{kind.signature}"
    definition = _functions_in(module).get(function_name)
    if definition is None:
        return None
    keyword = "async def" if isinstance(definition, ast.AsyncFunctionDef) else "def"
    if keyword != kind.keyword:
        raise ConfigError(f"{where}: got `{keyword} {function_name}`, expected `{expected}`")
    if kind.takes_argument is None:
        return definition
    if not (_takes_one(definition.args) if kind.takes_argument else _takes_none(definition.args)):
        got = f"{keyword} {function_name}({ast.unparse(definition.args)})"
        shape = "one positional parameter, the others keyword-only"
        raise ConfigError(
            f"{where}: got `{got}`, expected `{expected}`: "
            f"{shape if kind.takes_argument else 'keyword-only parameters'}"
        )
    return definition


def _takes_one(arguments: ast.arguments) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    return required <= 1 and (positional >= 1 or arguments.vararg is not None)


def _takes_none(arguments: ast.arguments) -> bool:
    return not arguments.posonlyargs and not arguments.args


def _check_parameters(
    what: str, arguments: ast.arguments, got: Mapping[str, object], settings: Collection[str]
) -> None:
    annotations = {argument.arg: argument.annotation for argument in arguments.kwonlyargs}
    defaults = dict(zip(annotations, arguments.kw_defaults, strict=True))
    known = parameters_text(arguments) or "none"
    for name, value in got.items():
        if name not in annotations and arguments.kwarg is None:
            near = difflib.get_close_matches(name, [*annotations, *settings], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{what} has no parameter {name!r}; {hint}Its parameters: {known}")
        annotation = annotations.get(name)
        if annotation is not None and not _fits(value, annotation):
            raise ConfigError(
                f"{what}: {name} = {value!r} ({type(value).__name__}), expected {_type_text(annotation)}; "
                f"its parameters: {known}"
            )
    missing = [name for name, default in defaults.items() if default is None and name not in got]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}; its parameters: {known}")
    values = _literal_defaults(arguments) | dict(got)
    for name, annotation in annotations.items():
        if annotation is not None and (bounds := _broken_bounds(name, annotation, values)):
            raise ConfigError(f"{what}: {name} = {values[name]!r}, expected {bounds}")


_RELATIONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {  # of the package annotated_types
    "Ge": ("at least", operator.ge),
    "Gt": ("more than", operator.gt),
    "Le": ("at most", operator.le),
    "Lt": ("less than", operator.lt),
}


def _broken_bounds(parameter: str, annotation: ast.expr, values: Mapping[str, object]) -> str:
    """The bounds of an annotation in words, if the parameter is outside; otherwise "". A bound that is
    no literal, or another parameter without a value, is left out."""
    value, words, holds = values.get(parameter), [], True
    for node in ast.walk(annotation):
        match node:
            case ast.Call(func=ast.Name(id=relation), args=[bound]) if relation in _RELATIONS:
                phrase, compare = _RELATIONS[relation]
                limit = _literal(bound)
                other = f"{limit} = " if isinstance(limit, str) else ""
                limit = values.get(limit) if isinstance(limit, str) else limit
                if limit is not None:
                    words.append(f"{phrase} {other}{limit}")
                    holds &= value is None or compare(value, limit)
    return "" if holds else " and ".join(words)


def parameters_text(arguments: ast.arguments) -> str:
    """A function's keyword parameters as text: `lam: float = 1.0, ...`."""
    return ", ".join(
        argument.arg
        + ("" if argument.annotation is None else f": {_type_text(argument.annotation)}")
        + ("" if default is None else f" = {ast.unparse(default)}")
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )


def _type_text(annotation: ast.expr) -> str:
    """An annotation as text, without bounds."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_type_text(left)} | {_type_text(right)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[bare, *_])):
            return _type_text(bare)
    return ast.unparse(annotation)


def _fits(value: object, annotation: ast.expr) -> bool:
    """Whether a TOML value fits an annotation; True for unknown annotations."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(value, left) or _fits(value, right)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[bare, *_])):
            return _fits(value, bare)
        case ast.Constant(value=None):
            return value is None
        case ast.Name(id="float"):
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        case ast.Name(id="int"):
            return isinstance(value, int) and not isinstance(value, bool)
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id="str"):
            return isinstance(value, str)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return value in [
                ast.literal_eval(choice)
                for choice in (choices.elts if isinstance(choices, ast.Tuple) else [choices])
            ]
    return True


def with_defaults(kind: FunctionKind, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A built-in function's parameters with values: those set, otherwise defaults."""
    return _literal_defaults(built_in(kind)[name].args) | dict(parameters)


def _literal_defaults(arguments: ast.arguments) -> dict[str, Any]:
    """By parameter; None for a default that is no literal, as in a user's function."""
    return {
        argument.arg: _literal(default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }


def _literal(expression: ast.expr) -> Any:
    """Its value, or None if it is no literal."""
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return None


def _assigned(module: ast.Module, name: str) -> ast.expr | None:
    """What the module binds to an annotated name."""
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node.value
    return None


def _functions_in(module: ast.Module) -> dict[str, Definition]:
    return {node.name: node for node in module.body if isinstance(node, Definition)}


def _imports_of(module: ast.Module) -> dict[str, Definition]:
    """Functions that the module imports from other modules of Atoll."""
    return {
        alias.name: definition
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("atoll.")
        for alias in node.names
        if (definition := _definition(node.module, alias.name)) is not None
    }


def _definition(module: str, function: str) -> Definition | None:
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    if not path.exists():  # a package
        return None
    return _functions_in(ast.parse(path.read_bytes())).get(function)
