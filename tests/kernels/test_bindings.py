"""Descriptions of what compiled functions take, and the checks made from them (kernels/cpu/ffi/bindings.py)."""

from __future__ import annotations

import pkgutil
import signal
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from struct import unpack
from typing import Any

import pytest
import torch

from kernels import cpu
from kernels.cpu.ffi.bindings import FieldGroup, Function, Struct, elements, floats, header, int64s, integer, real
from tests.forks import Forked, script

NO_SIZES = {
    "largest",
    "first",
    "iterations",
    "stride",
    "step0",
    "step1",
    "step2",
    "step3",
}  # a flag, a place, rounds, and the stride of a repeated row
MAY_BE_ZERO = {
    "DecodeRows.bits",
    "CodedAttention.count",
}  # of several sequences none may have a code; nothing divides by it


class Example(Struct):
    x = elements(strides="batch row")
    weights = FieldGroup("Pair", {"weight": elements("rows * width"), "bias": elements("rows", optional=True)})
    rows_read = int64s("count")
    out = floats("count", written=True)
    rows = width = count = integer()
    scale = real()


def fields(**other: Any) -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 3, 4), "weights_weight": torch.zeros(3, 4), "weights_bias": None,
        "rows_read": torch.zeros(5, dtype=torch.int64), "out": torch.zeros(5), "rows": 3, "width": 4, "count": 5,
        "scale": 0.5, **other,
    }  # fmt: skip


def test_fields_are_packed_in_the_order_of_the_struct() -> None:
    given = fields(x=torch.zeros(2, 3, 4)[:, 1:])
    addresses = [given[name].data_ptr() for name in ("x", "weights_weight", "rows_read", "out")]
    packed = unpack("11qd", Example.pack(**given))
    assert packed == (0, addresses[0], 48, 16, addresses[1], 0, *addresses[2:], 3, 4, 5, 0.5)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"x": torch.zeros(2, 3, 4).half()}, "x must be a CPU tensor .float32 or bfloat16"),
        ({"x": torch.zeros(2, 3, 4, device="meta")}, "x must be a CPU tensor .* on meta"),
        ({"x": torch.zeros(2, 4, 3).transpose(1, 2)}, "last dimension's entries side by side"),
        ({"x": torch.zeros(3, 4)}, "x must be"),
        ({"weights_weight": torch.zeros(3, 4).bfloat16()}, "one for all"),
        ({"weights_weight": torch.zeros(4, 3).T}, "weights_weight must be .* contiguous"),
        ({"weights_bias": torch.zeros(4)}, r"rows = 3 entries.*, got torch.float32 \[4\]"),
        ({"rows_read": torch.zeros(5, dtype=torch.int32)}, "rows_read must be a CPU tensor .int64"),
        ({"out": torch.zeros(6)}, "count = 5 entries"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Example: .*{said}"):
        Example.pack(**fields(**other))


def compiled(folder: Path, source: str) -> str:
    """What the compiler says against `source` behind the header of Example."""
    library = pytest.importorskip("kernels.cpu.ffi.library")
    try:
        compiler = library._compiler()
    except ImportError as error:
        pytest.skip(str(error))
    (folder / "calls.hpp").write_text(header((Function("run", Example),)))
    (folder / "it.cpp").write_text(f'#include "calls.hpp"\n{source}\n')
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{folder}", str(folder / "it.cpp")]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_what_cpp_reads_is_what_python_describes(tmp_path: Path) -> None:
    assert compiled(tmp_path, "EXPORT void run(const Example& e) { e.out[0] = (float)e.x_row * e.scale; }") == ""
    assert "gone" in compiled(tmp_path, "EXPORT void run(const Example& e) { e.out[0] = e.gone; }")
    assert "conflicting" in compiled(tmp_path, "EXPORT void run(const Example& e, int64_t more) {}")


def bindings() -> Iterator[type[Struct]]:
    for module in pkgutil.iter_modules(cpu.__path__):
        try:
            import_module(f"kernels.cpu.{module.name}")
        except ImportError as error:
            pytest.skip(str(error))
    yield from (one for one in Struct.__subclasses__() if one.__module__.startswith("kernels.cpu."))


def test_no_binding_takes_an_empty_or_a_negative_size() -> None:
    tried = []
    for struct in bindings():
        sizes = [name for name, field in struct.fields.items() if field.type == "int64_t" and name not in NO_SIZES]
        for name in sizes:
            least = 0 if f"{struct.__name__}.{name}" in MAY_BE_ZERO else 1
            for value in (least - 1, -5):
                given = {other: 1 for other in struct.fields} | {name: value}
                with pytest.raises(ValueError, match=rf"{struct.__name__}: sizes .*{name}={value}, at least {least}"):
                    struct.pack(**given)
        tried += sizes
    assert {"tokens", "count", "bytes", "num_segments", "head_dim", "clusters"} <= set(tried)


EMPTY = """
import torch
from kernels import ops
from kernels.reference import Segment
q, none = torch.zeros(1, 4, 1, 64), torch.zeros(1, 2, 0, 64)
try:
    ops.segment_attention(q, [Segment(none, none)], 1.0)
except ValueError as error:
    print(error)
"""


def test_attention_over_nothing_is_an_error_and_ends_no_process() -> None:
    next(bindings())
    process = Forked(script, EMPTY)
    code = process.wait()
    assert code != -signal.SIGFPE, "a division by zero in C++"
    assert (code, process.err) == (0, "")
    assert "num_segments=0" in process.out
