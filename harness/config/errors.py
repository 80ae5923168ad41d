"""Turns wrong input into one clear sentence; knows which errors are the user's to fix."""

from __future__ import annotations

import errno
import io
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from json import JSONDecodeError
from os.path import isfile
from pathlib import Path
from types import FrameType

import yaml

from evals.base import NO_DATA_ROOT, MissingData
from harness.config.catalogue import not_yaml
from harness.terminal.notices import complain, lasting_output, visible
from harness.terminal.stopping import Stoppable

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 60  # characters of a text that cannot be read
PACKAGES = ("evals", "harness", "kernels", "methods")
Main = Callable[..., int | None]


def is_known(error: BaseException) -> bool:
    """Return True if the error's message was written for the user. By convention that holds for
    ValueError and its subclasses; errors of memory, disk and Hydra count as well."""
    kinds = (ValueError, NotImplementedError, OSError, MemoryError, yaml.MarkedYAMLError)
    is_hydras = type(error).__module__ == "hydra.errors"  # which takes long to import
    return isinstance(error, kinds) or is_hydras or is_memory(error)


def sentence(error: BaseException) -> str:
    """Return the text that is printed in place of a traceback."""
    return visible(_sentence(error))


def _sentence(error: BaseException) -> str:
    if is_memory(error):
        return (
            f"Out of memory ({str(error).splitlines()[0] if str(error) else 'host'}): use shorter lengths, a smaller "
            "batch, prefill_chunk=2048, or dtype=bf16; `dry_run=true` predicts the bytes."
        )
    if breaks_device(error):
        first_line = (str(error).splitlines() or ["CUDA error"])[0].rstrip(".")
        return (
            f"{first_line}: this process cannot use the GPU any more. Run the same command again, which goes on after "
            "the last recorded example; CUDA_LAUNCH_BLOCKING=1 names the operation."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return f"The disk is full{where}: free some space and run the same command again."
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"Cannot use {error.filename}: {error.strerror}; name another file or folder."
    if isinstance(error, yaml.MarkedYAMLError):
        return not_yaml(error)
    if isinstance(error, (JSONDecodeError, UnicodeDecodeError)) and (place := _misread(error)):
        reason = (
            error.msg
            if isinstance(error, JSONDecodeError)
            else f"it is no {error.encoding}: {error.reason}"
        )
        return f"{place} cannot be read ({reason}): correct the file, or drop the row."
    text = " ".join(str(error).split())
    if isinstance(error, MissingData):
        return f"{text}, then add data.root=DATA. `task=niah` needs no data."
    return text.replace(NO_DATA_ROOT, "(none is set: data.root=FOLDER names one)")


def one_sentence(error: BaseException) -> str:
    """Return one sentence on any error. For an unforeseen one it names the class of the error, the
    line of the user's own code, and the file with the traceback."""
    # a run that failed keeps the traceback in its folder
    notes: list[str] = getattr(error, "__notes__", [])
    line = own_line(error)
    if is_known(error):
        text = sentence(error)
        return (
            f"{text.rstrip('.')} ({line}). {notes[0]}"
            if line and notes and isinstance(error, ValueError)
            else text
        )
    where = notes[0] if notes else f"The traceback is in {_kept(error)}."
    return (
        f"{type(error).__name__}: {sentence(error).rstrip('.')}{f' ({line})' * bool(line)}. {where}"
    )


def as_command(go_on: str = "the same command begins anew") -> Callable[[Main], Callable[..., int]]:
    """Make a function the `main` of a command: an error is printed as one sentence, a signal such
    as Ctrl-C ends it in order and prints `go_on`, output that nobody reads does not stop it, and it
    returns an exit code: 2 for an error that the user can fix, 1 for any other, and otherwise what the function
    returns (None counts as 0)."""

    def decorated(main: Main) -> Callable[..., int]:
        @wraps(main)
        def command(*arguments: object) -> int:
            code = 0
            with lasting_output(), Stoppable(go_on) as stop:
                try:
                    code = main(*arguments) or 0
                except Exception as error:
                    complain(one_sentence(error))
                    code = 2 if is_known(error) else 1
            return stop.code or code

        return command

    return decorated


def own_line(error: BaseException) -> str | None:
    """Return file and line of the user's own code that raised the error, as in a plug-in from
    outside this project; None if no such code was running."""
    place = None
    for frame, line in _own_frames(error):
        file = Path(frame.f_code.co_filename)
        place = f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}, line {line}"
    return place


def _own_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the user's own code in which the error was raised, and their lines."""
    others = [
        *(ROOT / name for name in PACKAGES),
        *map(Path, {*sysconfig.get_paths().values(), sys.prefix}),
    ]
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.is_file() and not any(file.is_relative_to(other) for other in others):
            yield frame, line


def _misread(error: JSONDecodeError | UnicodeDecodeError) -> str:
    """Return the place of a text that the user's own code cannot parse: its file and line, if a
    variable there holds the file or its name, or else the line of that code and the text's
    beginning. Empty if no such code was running."""
    if isinstance(error, JSONDecodeError):
        text, line = error.doc.encode(), error.lineno
        row = rb"^[ \t]*" + re.escape(text.rstrip()) + rb"\s*$"
    else:
        text, line = error.object, error.object[: error.start].count(b"\n") + 1
        row = re.escape(text)
    held = [value for frame, _ in _own_frames(error) for value in frame.f_locals.values()]
    for value in [
        *held,
        *(part for owner in held for part in getattr(owner, "__dict__", {}).values()),
    ]:
        file = getattr(value, "name", "") if isinstance(value, io.IOBase) else value
        if text.strip() and isinstance(file, (str, Path)) and isfile(file):
            data = Path(file).read_bytes()
            if found := re.search(row, data, re.MULTILINE):
                line += data.count(b"\n", 0, found.start())
                return f"{file}, line {line},"
    code = own_line(error)
    return f"{text[:SHOWN].decode(errors='replace')!r}, which {code} parses," if code else ""


def _kept(error: BaseException) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="kv-harness-", suffix=".txt", delete=False
    ) as file:
        file.writelines(traceback.format_exception(error))
    return file.name


def is_memory(error: BaseException) -> bool:
    """Return True if the error means that memory ran out: Python's, torch's on the CPU, or a
    GPU's."""
    text, kind = str(error), type(error).__name__  # importing torch for its class takes long
    is_named = isinstance(error, MemoryError) or kind == "OutOfMemoryError"
    # the last is cuBLAS's and cuDNN's
    signs = ("out of memory", "can't allocate memory", "status_alloc_failed")
    return is_named or any(sign in text.lower() for sign in signs)


def breaks_device(error: BaseException) -> bool:
    """Return True for an error of CUDA after which no call of this process succeeds on the device,
    such as a device-side assert or an illegal access. Running out of memory is not such an
    error."""
    # Triton words them in its own way
    signs = ("CUDA error", "illegal memory access", "device-side assert")
    is_cudas = type(error).__name__ == "AcceleratorError" or any(
        sign in str(error) for sign in signs
    )
    return is_cudas and not is_memory(error)
