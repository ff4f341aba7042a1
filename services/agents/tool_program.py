"""The program that runs one call of a user's function in the sandbox. Imports only the standard library: its
source is the beginning of the program (sandbox_calls.py).

It reads a call from stdin, writes the workspace's files into its working directory, executes the user's file,
calls the function, and reports on stdout. Both are one JSON object:

    {"function": "add", "arguments": {"a": 1, "b": 2}, "files": {"notes.txt": "sums"}}
    {"text": "3", "is_error": false, "files": {"notes.txt": "sums"}, "num_left_out": 0}

The function may execute what a policy wrote, which may then report anything in its name.
"""

import io
import json
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

MAX_TEXT = 1 << 16  # bytes that are printed, and characters of a result
MAX_FILES, MAX_FILES_BYTES = 256, 1 << 19  # of a workspace
MAX_PATH = 200  # characters
MODULE = "atoll_tool_file"  # the user's file, under a name that no module of a workspace has


def main(source: str, name: str) -> None:
    """Runs the call; `source` and `name` are those of the user's file. Does not return."""
    call = json.load(sys.stdin)
    report_fd, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in 0, 1, 2:  # what bypasses sys.stdout is no report
        os.dup2(null, stream)
    report = json.dumps(run_call(call, source, name), ensure_ascii=False).encode(errors="replace")
    while report:
        report = report[os.write(report_fd, report) :]
    os._exit(0)  # without waiting for the function's threads


def run_call(call: Mapping[str, Any], source: str, name: str) -> dict[str, Any]:
    """The report. `files` are null if they exceed a limit."""
    folder, printed, is_error = os.getcwd(), PrintedText(), False
    stream = io.TextIOWrapper(printed, "utf-8", "backslashreplace", write_through=True)
    write_files(call["files"])  # if that fails, there is no report, and so no change
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            text = result_text(load(source, name)[call["function"]](**call["arguments"]))
    except BaseException as error:  # also SystemExit of what the function executes
        is_error, text = True, error_text(error)
    text = "\n".join(filter(None, (printed.text().rstrip("\n"), text[:MAX_TEXT])))
    try:
        files, num_left_out = read_files(folder)
    except ValueError as error:
        return {"text": f"{text}\n{error}", "is_error": True, "files": None, "num_left_out": 0}
    return {"text": text, "is_error": is_error, "files": files, "num_left_out": num_left_out}


def load(source: str, name: str) -> dict[str, Any]:
    """Executes the user's file; returns what it binds."""
    sys.dont_write_bytecode = True  # of modules in the working directory
    module = sys.modules[MODULE] = ModuleType(MODULE)
    exec(compile(source, name, "exec"), vars(module))
    return vars(module)


def result_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def error_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except BaseException:  # its __str__ is somebody's code, too
        return type(error).__name__


def is_plain(path: str) -> bool:
    """Whether a path leads below the working directory, is spelled in the only way, and can be printed."""
    parts = PurePosixPath(path).parts
    is_below = bool(parts) and parts[0] != "/" and ".." not in parts
    return is_below and path == "/".join(parts) and path.isprintable() and len(path) <= MAX_PATH


def write_files(files: Mapping[str, str]) -> None:
    for path, text in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(text.encode())


def read_files(folder: str) -> tuple[dict[str, str], int]:
    """All files of `folder`, and how many more were left out, since they are not text or oddly named. Raises
    ValueError if they exceed a limit."""
    files: dict[str, str] = {}
    num_left_out = num_bytes = 0
    for where, _, names in os.walk(folder):
        for path in [os.path.join(where, name) for name in names]:
            num_bytes += os.lstat(path).st_size
            if num_bytes > MAX_FILES_BYTES or len(files) == MAX_FILES:
                raise ValueError(
                    f"The working directory has more than {MAX_FILES} files or {MAX_FILES_BYTES} bytes: this "
                    "call changes no file."
                )
            text, name = read_text(path), os.path.relpath(path, folder)
            if text is None or not is_plain(name):
                num_left_out += 1
            else:
                files[name] = text
    return files, num_left_out


def read_text(path: str) -> str | None:
    """None if it is no regular file with text that can be read."""
    try:
        about = os.lstat(path)
        if not stat.S_ISREG(about.st_mode):
            return None
        with open(path, "rb") as file:
            return file.read(about.st_size).decode()
    except (OSError, UnicodeDecodeError):
        return None


class PrintedText(io.BytesIO):
    """Keeps the first MAX_TEXT bytes that are written."""

    def write(self, data: Any, /) -> int:
        super().write(bytes(data)[: max(0, MAX_TEXT - self.tell())])
        return len(data)

    def close(self) -> None:
        pass  # with sys.stdout, which the function may close

    def text(self) -> str:
        return self.getvalue().decode(errors="replace")
