"""Describes in Python, in one place, what a compiled function takes; both sides are generated from
the description.

    class RowScores(Struct):
        q = elements("batch * groups * heads * width")
        x = elements(strides="batch group row")
        out = floats("batch * groups * heads * count", written=True)
        batch = groups = heads = count = width = integer()

    library = load("scores", Function("row_scores", RowScores))
    library.row_scores(q=q, x=x, out=out, batch=1, ...)

The build writes `struct RowScores` and the prototype of `row_scores` into the header calls.hpp,
which the C++ file includes, so neither can differ from what Python packs. A call checks every size
(none may be empty or negative) and every tensor (dtype, device, size, layout). docs/kernels.md says
why this is not torch's extension mechanism."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct as Packer
from typing import Any, ClassVar

import torch

_ELEMENTS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Field:
    """Describe one field of a C++ struct: a number, or a tensor, of which it holds the address.
    Each takes eight bytes, so no compiler puts gaps between them."""

    type: str  # its type in C++
    dtypes: tuple[torch.dtype, ...] = ()  # of a tensor; () is any; two: all such tensors share one
    size: str | None = None  # entries of a contiguous tensor, as an expression in the other fields
    # names of the dimensions before the last, whose strides in bytes become fields
    strides: tuple[str, ...] = ()
    optional: bool = False  # whether None is allowed, as a null pointer
    least: int | None = None  # the least value of a number


@dataclass(frozen=True)
class FieldGroup:
    """Describe several fields that form an inner struct in C++; Python passes them as
    `<group>_<field>`."""

    type: str
    fields: dict[str, Field]


def integer(least: int | None = 1) -> Field:
    """Describe an integer field: a size, or any number of at least `least` (None: any). C++ divides
    by sizes, and a division by zero would end the process without an error message."""
    return Field("int64_t", least=least)


def real() -> Field:
    return Field("double")


def elements(size: str | None = None, **how: Any) -> Field:
    """Describe a tensor field of float32 or bfloat16; all such tensors of a call must have the same
    dtype, and the struct gets the field `is_bf16`. `size` and `how`: as in `_tensor`."""
    return _tensor("void", _ELEMENTS, size, **how)


def floats(size: str | None = None, **how: Any) -> Field:
    return _tensor("float", (torch.float32,), size, **how)


def int64s(size: str | None = None, **how: Any) -> Field:
    return _tensor("int64_t", (torch.int64,), size, **how)


def int32s(size: str | None = None, **how: Any) -> Field:
    return _tensor("int32_t", (torch.int32,), size, **how)


def anything(size: str | None = None, **how: Any) -> Field:
    return _tensor("void", (), size, **how)


def _tensor(
    entry: str,
    dtypes: tuple[torch.dtype, ...],
    size: str | None,
    *,
    strides: str = "",
    written: bool = False,
    optional: bool = False,
) -> Field:
    """Describe a tensor field of C++ type `entry`*. It must be contiguous with `size` entries (an
    expression in other fields), or `strides` names the dimensions whose strides are passed too.
    With neither, the caller is responsible for the layout."""
    return Field(
        f"{'' if written else 'const '}{entry}*", dtypes, size, tuple(strides.split()), optional
    )


class Struct:
    """Describe a struct of C++: subclasses list its fields as class attributes. `pack` takes their
    values by name and returns the bytes of the struct; `header` holds its C++ definition."""

    fields: ClassVar[dict[str, Field]]
    pack: ClassVar[Callable[..., bytes]]
    header: ClassVar[list[str]]

    def __init_subclass__(cls) -> None:
        named = {
            name: value
            for name, value in vars(cls).items()
            if isinstance(value, Field | FieldGroup)
        }
        cls.header = _header(cls.__name__, named)
        cls.fields = dict(_flat(named))
        cls.pack = staticmethod(_checked(cls))


class Function:
    """Describe an `extern "C"` function that takes structs, or nothing. Python callers pass the
    fields of the last struct by name, after the other structs as packed bytes."""

    def __init__(self, name: str, *structs: type[Struct], returns: str = "void") -> None:
        self.name, self.structs, self.returns = name, structs, returns

    @property
    def prototype(self) -> str:
        parameters = ", ".join(f"const {struct.__name__}&" for struct in self.structs)
        return f"EXPORT {self.returns} {self.name}({parameters});"

    def bound(self, library: ctypes.CDLL) -> Callable[..., Any]:
        entry = getattr(library, self.name)
        entry.argtypes = [ctypes.c_char_p] * len(self.structs)
        entry.restype = ctypes.c_int64 if self.returns == "int64_t" else None
        return (
            _checked(self.structs[-1], entry, len(self.structs) - 1)
            if self.structs
            else lambda: entry()
        )


def header(functions: tuple[Function, ...]) -> str:
    """Return the text of the C++ header calls.hpp, with the structs and prototypes of these
    functions."""
    structs = dict.fromkeys(struct for function in functions for struct in function.structs)
    parts = dict.fromkeys(part for struct in structs for part in struct.header)
    return "\n".join([_PREAMBLE, *parts, *(function.prototype for function in functions), ""])


def bound(library: ctypes.CDLL, functions: tuple[Function, ...]) -> dict[str, Callable[..., Any]]:
    return {function.name: function.bound(library) for function in functions}


_PREAMBLE = """// Made from the descriptions in kernels/cpu/*.py: see ffi/bindings.py
#pragma once
#include <cstddef>
#include <cstdint>
#define EXPORT extern "C" __attribute__((visibility("default")))
"""


def _header(name: str, fields: dict[str, Field | FieldGroup]) -> list[str]:
    """Return C++ code for a struct: the definitions of the structs it contains, its own, and an
    assertion about its size."""
    groups = {
        field.type: field.fields for field in fields.values() if isinstance(field, FieldGroup)
    }
    inner = [_definition(name, parts) for name, parts in groups.items()]
    count = sum(1 + len(field.strides) for _, field in _flat(_with_dtype(fields)))
    return [
        *inner,
        _definition(name, _with_dtype(fields)),
        f"static_assert(sizeof({name}) == {8 * count});",
    ]


def _definition(name: str, fields: dict[str, Any]) -> str:
    lines = [f"    {field.type} {part};" for part, field in _with_strides(fields)]
    return "\n".join([f"struct {name} {{", *lines, "};"])


def _with_dtype(fields: dict[str, Any]) -> dict[str, Any]:
    typed = any(field.dtypes == _ELEMENTS for _, field in _flat(fields))
    return {"is_bf16": integer(), **fields} if typed else fields


def _with_strides(fields: dict[str, Any]) -> Iterator[tuple[str, Field | FieldGroup]]:
    for name, field in fields.items():
        yield name, field
        if isinstance(field, Field):
            yield from ((f"{name}_{dimension}", integer()) for dimension in field.strides)


def _flat(fields: dict[str, Any]) -> Iterator[tuple[str, Field]]:
    for name, field in fields.items():
        if isinstance(field, FieldGroup):
            yield from ((f"{name}_{part}", inner) for part, inner in field.fields.items())
        else:
            yield name, field


def _checked(struct: type[Struct], entry: Any = None, before: int = 0) -> Callable[..., Any]:
    """Generate a Python function that takes a struct's fields by name, checks them, and packs them
    to bytes. It passes these to the C function `entry`, after `before` structs that are packed
    already, or returns them if there is no `entry`. It is generated as source code for speed, since
    a step makes hundreds of calls."""
    fields = struct.fields
    typed = next(
        (
            part
            for part, field in fields.items()
            if field.dtypes == _ELEMENTS and not field.optional
        ),
        None,
    )
    structs = [f"struct{i}" for i in range(before)]
    lines = [f"def call({', '.join([*structs, '*', *fields])}):"]  # keeps the tensors alive for C++
    for part, field in fields.items():
        if field.least is not None:
            lines.append(f"if {part} < {field.least}: raise refused({part!r}, locals())")
    lines += [f"dtype = {typed}.dtype"] if typed else []
    values = ["dtype is bfloat16"] if typed else []
    for part, field in fields.items():
        lines += _checks(part, field, first=part == typed)
        values += _values(part, field)
    codes = "".join(
        "d" if field.type == "double" else "q" * (1 + len(field.strides))
        for field in fields.values()
    )
    packed = f"packed({', '.join(values)})"
    if entry:
        lines.append(f"return entry({', '.join([*structs, packed])})")
    else:
        lines.append(f"return {packed}")
    scope: dict[str, Any] = {
        "entry": entry,
        "packed": Packer("q" * bool(typed) + codes).pack,
        "refused": _refusal(struct.__name__, fields),
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "int32": torch.int32,
        "int64": torch.int64,
    }
    exec("\n    ".join(lines), scope)
    return scope["call"]


def _checks(name: str, field: Field, first: bool) -> list[str]:
    """Return lines of Python source that raise an error if the tensor `name` does not fit `field`,
    so that C++ would misread it. The `first` tensor sets the dtype for all."""
    if not field.type.endswith("*"):
        return []
    wrong = [f"not {name}.is_cpu"]
    if field.dtypes == _ELEMENTS:
        wrong.append(
            "dtype is not float32 and dtype is not bfloat16"
            if first
            else f"{name}.dtype is not dtype"
        )
    elif field.dtypes:
        wrong.append(f"{name}.dtype is not {str(field.dtypes[0]).removeprefix('torch.')}")
    if field.size:
        wrong += [f"{name}.numel() != {field.size}", f"not {name}.is_contiguous()"]
    lines = []
    if field.strides:
        lines = [f"{name}_strides, {name}_bytes = {name}.stride(), {name}.element_size()"]
        wrong.append(f"len({name}_strides) != {len(field.strides) + 1}")
        wrong.append(f"{name}_strides[-1] != 1 and {name}.shape[-1] > 1")
    lines.append(f"if {' or '.join(wrong)}: raise refused({name!r}, locals())")
    return (
        [f"if {name} is not None:", *(f"    {line}" for line in lines)] if field.optional else lines
    )


def _values(name: str, field: Field) -> list[str]:
    if not field.type.endswith("*"):
        return [name]
    values = [f"{name}.data_ptr()"]
    values += [f"{name}_strides[{i}] * {name}_bytes" for i in range(len(field.strides))]
    return [f"0 if {name} is None else {value}" for value in values] if field.optional else values


def _refusal(struct: str, fields: dict[str, Field]) -> Callable[[str, dict[str, Any]], ValueError]:
    """Return a function that makes the error for an argument that does not fit its field; it gets
    the argument's name and all arguments."""

    def refused(name: str, given: dict[str, Any]) -> ValueError:
        x = given[name]
        if isinstance(x, torch.Tensor):
            x = f"{x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
        return ValueError(f"{struct}: {name} does not fit {fields[name]}, got {x}")

    return refused
