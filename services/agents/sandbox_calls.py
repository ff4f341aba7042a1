"""A user's functions as tools that run in the sandbox of a reward service, with a workspace of files.

Each call is a program of its own (tool_program.py), so a workspace travels with the calls: its files go into
the program's working directory, and those that the program leaves there come back. A function may execute
what the policy wrote, so whatever a call reports is data of its session, and proves nothing.

The policy sees a function's name, docstring and positional parameters: one without an annotation is a string,
one without a default is required. Keyword-only parameters are hidden: they are fields of the row's `extra`,
as JSON unless they are strings. (What the function executes can read them: they are no place for answers.) In
the sandbox a function gets plain JSON values, and has Python's standard library alone.
"""

import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.json_schema import GenerateJsonSchema

from atoll.agents import tool_program
from atoll.agents.tool_program import MAX_FILES, MAX_FILES_BYTES, MAX_TEXT, is_plain
from atoll.config.errors import ConfigError
from atoll.config.functions import load_user_function
from atoll.config.schema import SandboxConfig
from atoll.config.user_files import source_of
from atoll.external.base import Tool
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import SandboxError, UserError
from atoll.wire.types import NO_TEXTS, Execution, ProgramLimits, ProgramStatus

_HARNESS: Final = inspect.getsource(tool_program)
MAX_SHOWN: Final = 3 * MAX_TEXT  # characters of a report: printed, returned, and a note
MAX_PROBLEMS: Final = 500  # characters that say what is wrong with a call
MAX_LEFT_OUT: Final = 4096  # files: as many as a working directory may have
UNCHANGED: Final = "The files are as they were before the call."
Files = Mapping[str, str]  # text by relative path


@dataclass(frozen=True, slots=True)
class CallResult:
    text: str  # what the policy reads
    is_error: bool
    files: Files  # the workspace from now on


class FunctionTool:
    """A function `file.py:function`, and its description for the policy."""

    def __init__(self, name: str) -> None:
        """Imports the file. Raises ConfigError if that fails, or if a parameter has no JSON schema."""
        path, _, self.name = name.rpartition(":")
        source = source_of(name)
        self.file, self.source = Path(path).name, importlib.util.decode_source(source)
        function = load_user_function(name, source)
        try:
            self._shown, self._hidden = _parameters(function)
            schema = self._shown.model_json_schema(schema_generator=_PlainSchema)
        except Exception as error:  # of an annotation
            raise ConfigError(f"agents.tools.functions: {name}: {type(error).__name__}: {error}") from error
        schema.pop("title")
        self.tool = Tool(self.name, inspect.getdoc(function) or "", schema)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The policy's arguments as JSON values that fit the schema ("5" fits an integer). Raises ValueError
        that says what does not."""
        try:
            return _values(self._shown, given)
        except ValidationError as error:
            raise ValueError(_problems(error)) from None

    def hidden_arguments(self, extra: Mapping[str, str]) -> dict[str, Any]:
        """The other arguments, from a row's fields. Raises UserError if one is missing or does not fit."""
        try:
            return _values(self._hidden, extra)
        except ValidationError as error:
            raise UserError(
                f"tool {self.name}: the row's extra fields do not fit: {_problems(error)}"
            ) from None


def _parameters(function: Callable[..., Any]) -> tuple[type[BaseModel], type[BaseModel]]:
    """Models of the positional and of the keyword-only parameters."""
    shown: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    json_of: Any = Json  # no type to a type checker, with a type that it does not know
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind: Any = str if parameter.annotation is Parameter.empty else parameter.annotation
        field = Field(... if parameter.default is Parameter.empty else parameter.default, alias=name)
        match parameter.kind:  # fields have names of their own, since not every name may be one's
            case Parameter.POSITIONAL_OR_KEYWORD:
                shown[f"shown_{len(shown)}"] = kind, field
            case Parameter.KEYWORD_ONLY:
                hidden[f"hidden_{len(hidden)}"] = kind if kind is str else json_of[kind], field
            case _:
                raise ConfigError(f"parameter {parameter}: expected one with a name of its own")
    return (
        create_model("Shown", __config__=ConfigDict(extra="forbid"), **shown),
        create_model("Hidden", __config__=ConfigDict(extra="ignore"), **hidden),
    )


def _values(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given: for others the function has defaults. Raises ValueError, also if they are nested
    too deeply."""
    return model.model_validate(arguments).model_dump(mode="json", by_alias=True, exclude_unset=True)


class _PlainSchema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def parse_files(text: str) -> Files:
    """A row's files, `{"PATH": "TEXT"}`. Raises UserError if they are no such object or exceed a limit."""
    try:
        return _FILES.validate_json(text)
    except ValidationError as error:
        raise UserError(f"files of a row, as an object from path to text: {_problems(error)}") from None


def _check_path(path: str) -> str:
    if not is_plain(path):
        raise ValueError(f"path {path!r}: expected a relative one such as tests/test_sum.py")
    return path


def _check_size(files: Files) -> Files:
    if sum(len(text.encode()) for text in files.values()) > MAX_FILES_BYTES:
        raise ValueError(f"expected at most {MAX_FILES_BYTES} bytes")
    return files


CheckedFiles = Annotated[
    dict[Annotated[str, AfterValidator(_check_path)], str],
    Field(max_length=MAX_FILES),
    AfterValidator(_check_size),
]
_FILES: Final = TypeAdapter(CheckedFiles)


class _Report(BaseModel):
    text: str
    is_error: bool
    files: CheckedFiles | None  # None: they exceed a limit
    num_left_out: Annotated[int, Field(ge=0, le=MAX_LEFT_OUT)]


def program(
    tool: FunctionTool, arguments: Mapping[str, Any], hidden: Mapping[str, Any], files: Files
) -> tuple[str, bytes]:
    """Source and stdin of a call with arguments that the tool has checked; `files` are of `parse_files` or of
    another call's result."""
    call = {"function": tool.name, "arguments": {**arguments, **hidden}, "files": dict(files)}
    return f"{_HARNESS}\nmain({tool.source!r}, {tool.file!r})\n", json.dumps(call).encode()


def parse(execution: Execution, files: Files) -> CallResult:
    """The result of a call that began with `files`, which stay as they are if it reports none."""
    if execution.status is not ProgramStatus.OK:
        end = f"{execution.status.value}: {execution.detail}".removesuffix(": ")
        return CallResult(f"{end[:MAX_PROBLEMS]}. {UNCHANGED}", True, files)
    try:
        report = _Report.model_validate_json(execution.stdout)
    except ValidationError:
        return CallResult(f"The call ended without a result. {UNCHANGED}", True, files)
    text = report.text[:MAX_SHOWN]
    if report.num_left_out:
        text += f"\n[{report.num_left_out} files that are not text, or have odd names, are not kept]"
    return CallResult(text, report.is_error, files if report.files is None else report.files)


class SandboxTools:
    """Functions as tools, called in the sandbox of one reward service."""

    def __init__(
        self, client: RewardClient, tools: Sequence[FunctionTool], sandbox: SandboxConfig, timeout_s: float
    ) -> None:
        """`sandbox`: limits of a call, besides `timeout_s`. Raises ConfigError if two tools have one name."""
        self._client = client
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = ", ".join(tool.name for tool in tools)
            raise ConfigError(f"agents.tools.functions: {names}: two have the same name: rename one")
        self._limits = ProgramLimits(
            timeout_s, sandbox.memory_mb << 20, sandbox.output_kb << 10, sandbox.disk_mb << 20
        )
        self._has_disk: bool | None = None  # None: not asked yet

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(tool.tool for tool in self._tools.values())

    async def check(self) -> None:
        """Raises UserError if a tool's file fails in the sandbox, as one that imports an installed package
        does, SandboxError and ServiceUnavailableError."""
        for tool in self._tools.values():
            source = f"{_HARNESS}\nload({tool.source!r}, {tool.file!r})[{tool.name!r}]\n"
            execution = await self._client.execute(source, b"", self._limits)
            if execution.status is not ProgramStatus.OK:
                raise UserError(
                    f"agents.tools.functions: {tool.file}:{tool.name} fails in the sandbox, which has "
                    f"Python's standard library alone: {execution.status.value}: {execution.detail}"
                )

    async def call(
        self, name: str, arguments: Mapping[str, Any], files: Files, extra: Mapping[str, str] = NO_TEXTS
    ) -> CallResult:
        """What the policy gets for a call, whatever it wrote. Raises UserError if the row's `extra` lacks a
        hidden argument, SandboxError if the sandbox fails or cannot hold files, and ServiceUnavailableError.
        """
        tool = self._tools.get(name)
        if tool is None:
            return CallResult(
                f"There is no tool {name!r:.100}; there is {', '.join(self._tools)}.", True, files
            )
        try:
            checked = tool.arguments(arguments)
        except ValueError as error:
            return CallResult(f"Invalid arguments: {error}", True, files)
        if files:
            await self._require_disk()
        source, stdin = program(tool, checked, tool.hidden_arguments(extra), files)
        return parse(await self._client.execute(source, stdin, self._limits), files)

    async def _require_disk(self) -> None:
        if self._has_disk is None:
            self._has_disk = (await self._client.describe()).disk_bytes > 0
        if not self._has_disk:
            raise SandboxError(
                f"tools with files need a directory that programs can write to, which the sandbox at "
                f"{self._client.address} lacks: set reward.sandbox.disk_mb, and let it use namespaces "
                "(`atoll doctor` says what forbids them)"
            )


def _problems(error: ValidationError) -> str:
    """Where and why values do not fit."""
    problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
    return "; ".join(": ".join(filter(None, problem)) for problem in problems)[:MAX_PROBLEMS]
