"""Contains what all Triton kernels share: refusals, block sizes, the product of two tiles."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dispatch import forced_backend
from kernels.per_sequence import PerSequence, most_of
from kernels.ragged import RAGGED, Ragged, counts_of

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 512  # bytes of a head
_REGISTERS = 1 << 16  # of a multiprocessor
_MOST_SHARING = 64  # query heads of one KV head

_interpreted = tl.constexpr(INTERPRETED)
Numbers = tuple[Tensor, Any]  # what `each` returns


def unfit(*tensors: Tensor | Ragged) -> str | None:
    """Return why no kernel can run on these tensors, or None: they must be plain tensors on the
    current CUDA device. If Triton runs in its interpreter, any device will do, but `use_backend`
    must have asked for Triton."""
    if any(isinstance(x, Ragged) for x in tensors):
        return RAGGED
    if INTERPRETED:
        return (
            None
            if forced_backend() == "triton"
            else "runs in the interpreter here, and only on request"
        )
    if not all(
        x.device.type == "cuda" and x.device.index == torch.cuda.current_device() for x in tensors
    ):
        return f"takes tensors on the current CUDA device, got {', '.join(sorted({str(x.device) for x in tensors}))}"
    return None


def unfit_host(x: Tensor, *others: Tensor) -> str | None:
    """Return why no kernel can read x, perhaps host memory, beside `others` on the device, or None."""
    if x.device.type != "cpu" or INTERPRETED:
        return unfit(x, *others)
    return unfit(*others) if x.is_pinned() or not x.numel() else "reads host memory that is pinned"


def unfit_floats(*tensors: Tensor) -> str | None:
    """Return why no kernel can run on tensors that must share one floating dtype, or None."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return (
            f"takes one of float32, bfloat16 and float16, got {', '.join(sorted(map(str, dtypes)))}"
        )
    return unfit(*tensors)


def unfit_heads(*tensors: Tensor) -> str | None:
    """Return why no kernel can run on tensors whose last dimension is the channels of a head, or
    None: channels must be contiguous, heads not too wide, and dtypes the same."""
    if any(x.stride(-1) != 1 for x in tensors):
        return "needs the channels of a row side by side"
    if tensors[0].shape[-1] * tensors[0].element_size() > _WIDEST:
        return (
            f"takes heads of up to {_WIDEST} bytes, got {tensors[0].shape[-1]} x {tensors[0].dtype}"
        )
    return unfit_floats(*tensors)


def unfit_shape(x: Tensor | Ragged | None, *sizes: int | None) -> str | None:
    """Return why no kernel can run on x if its shape is not `sizes`, or None: kernels broadcast
    nothing. A size of None allows any; x may be missing."""
    if x is None:
        return None
    shape = tuple(x.shape)
    if len(shape) == len(sizes) and all(
        want in (None, have) for want, have in zip(sizes, shape, strict=True)
    ):
        return None
    return f"takes a tensor of [{', '.join('any' if size is None else str(size) for size in sizes)}], got {list(shape)}"


def unfit_numbers(numbers: Tensor | None, batch: int) -> str | None:
    """Return why no kernel can run unless `numbers` is [1], for all sequences, or [B], one for each
    of the `batch`; None if it can."""
    if numbers is None or (numbers.dim() == 1 and len(numbers) in (1, batch)):
        return None
    return (
        f"takes one number for all of {batch} sequences or one for each, got {list(numbers.shape)}"
    )


def unfit_sharing(heads: int, groups: int) -> str | None:
    """Return why no kernel takes `heads` query heads that share `groups` KV heads, or None."""
    if heads % groups:
        return f"takes whole groups of heads, got {heads} query heads of {groups} KV heads"
    return unfit_group(heads // groups)


def unfit_group(heads: int) -> str | None:
    """Return why no kernel takes `heads` query heads per KV head, or None."""
    return (
        None
        if heads <= _MOST_SHARING
        else f"takes up to {_MOST_SHARING} query heads of a KV head, got {heads}"
    )


class Rows(NamedTuple):
    """Say where the rows of a tensor lie, as one argument of a kernel (`head_rows`, `row_places`).
    Nothing in it is None: Triton 3.6 could not tell then whether all of it is."""

    x: Tensor  # of their dtype; they are its rows if there is no table
    table: Any  # the addresses of each sequence's tensor, of a `Ragged`
    listed: Any  # whether there is a table
    batch: int  # strides of x
    group: int
    row: int
    aligned: (
        Any  # bytes of which all steps between rows are multiples, and all addresses of a table
    )


def located(x: Tensor | Ragged) -> Rows:
    """Return where the rows of x [B G S ...] lie, for a kernel; x may have a tensor per sequence."""
    first, table, aligned = (
        (x.first, x.table, x.alignment) if isinstance(x, Ragged) else (x, tl.constexpr(0), 1)
    )
    batch, group, row = first.stride()[:3]
    listed = tl.constexpr(isinstance(x, Ragged))
    return Rows(first, table, listed, batch, group, row, tl.constexpr(aligned))


def located_angles(x: Tensor | Ragged, batch: int) -> Rows:
    """Return where a table of cos or sin lies, [1 C R] or [C R] for all of `batch` sequences, or one
    for each (`Ragged`)."""
    return located(x if isinstance(x, Ragged) else x.expand(batch, *x.shape[-2:]))


def each(numbers: Tensor | None) -> Numbers | None:
    """Return numbers [1], for all sequences, or [B], one for each, as one argument of a kernel
    (`number_of`): with the step from one sequence's number to the next. Beside None, Triton 3.6
    takes a number 1 in a tuple for None, but no constant."""
    return None if numbers is None else (numbers, tl.constexpr(int(len(numbers) > 1)))


def lengths_of(x: Tensor | Ragged) -> Numbers | None:
    """Return the lengths of unequal sequences as `each` does, or None if x is one tensor."""
    return each(counts_of(x, x.device))


def known(number: int | PerSequence, device: torch.device) -> tuple[Numbers | None, int]:
    """Return a number for all sequences, or one for each, for a kernel: as `each` does, or None if
    it is the same for all, and the largest."""
    return each(counts_of(number, device)), most_of(number)


@triton.constexpr_function
def padded(size: int, least: int = 16) -> int:
    """Return the side of a tile that holds `size` entries: a power of two, and at least `least`, by
    default what the tensor cores take."""
    return max(least, triton.next_power_of_2(size))


def wide_rows(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty fp32 tensor [... S] on the device of `like`, whose rows begin a multiple of
    16 entries apart, so that kernels may load and store several entries at once."""
    return like.new_empty((*shape[:-1], -(-shape[-1] // 16) * 16), dtype=torch.float32)[
        ..., : shape[-1]
    ]


def split(count: int, programs: int, block: int) -> tuple[int, int]:
    """Return into how many pieces to cut `count` tokens, and how long each is (a multiple of
    `block`), so that the device is busy when each piece runs on `programs` programs."""
    wanted = max(1, _programs_wanted() // programs)
    length = triton.cdiv(triton.cdiv(count, wanted), block) * block
    return triton.cdiv(count, length), length


def places(shared: int, registers: int, warps: int) -> int:
    """Return how many programs run on the device at once, if each takes `shared` bytes of a
    multiprocessor's shared memory (and one KiB that the driver takes), and has `warps` of 32
    threads with `registers` each."""
    if INTERPRETED:
        return 16
    device, block = _device(), 32 * warps
    # the least, if torch does not say
    whole = getattr(device, "shared_memory_per_multiprocessor", 100 << 10)
    fit = whole // (shared + 1024), _REGISTERS // (registers * block)
    return device.multi_processor_count * max(
        1, min(*fit, device.max_threads_per_multi_processor // block)
    )


def stages(x: Tensor) -> int:
    """Return how many tiles of rows x [... D] a kernel's loop loads ahead (Triton's num_stages)."""
    return 3 if x.shape[-1] * x.element_size() <= 256 else 2


@cache
def _device() -> Any:
    return torch.cuda.get_device_properties("cuda")


def _programs_wanted() -> int:
    """Return how many programs a launch should have: four per multiprocessor; few under the
    interpreter, but enough to cut even small inputs."""
    return 6 if INTERPRETED else 4 * _device().multi_processor_count


@triton.jit
def head_rows(rows, sequence, group):
    """Return a pointer to the first row of a KV head, and the step between rows in entries, as int64.
    Without the hint that `aligned` gives, rows would be read entry by entry."""
    kind: tl.constexpr = rows.x.dtype.element_ty
    size: tl.constexpr = kind.primitive_bitwidth // 8
    if rows.listed:
        place = rows.table + 3 * sequence
        first = (tl.load(place) + group * tl.load(place + 1)).to(tl.pointer_type(kind))
        tl.multiple_of(first, rows.aligned)
        step = tl.load(place + 2) // size
    else:
        first = rows.x + sequence * rows.batch + tl.cast(group, tl.int64) * rows.group
        step = tl.cast(rows.row, tl.int64)
    # a product, since a hint on a load would be lost
    entries: tl.constexpr = max(1, rows.aligned // size)
    return first, step // entries * entries


@triton.jit
def row_places(rows, sequence):
    """Return a pointer to the first row of a sequence, and the step between rows in entries, as int64,
    for a tensor [B S D], whose rows are in the second dimension."""
    if rows.listed:
        kind: tl.constexpr = rows.x.dtype.element_ty
        first = tl.load(rows.table + 3 * sequence).to(tl.pointer_type(kind))
        step = tl.load(rows.table + 3 * sequence + 1) // (kind.primitive_bitwidth // 8)
    else:
        first, step = rows.x + sequence * rows.batch, tl.cast(rows.group, tl.int64)
    return first, step


@triton.jit
def number_of(numbers, sequence, number):
    """Return a sequence's entry in `numbers` (`each`), or `number` if that is None."""
    if numbers is not None:
        number = tl.load(numbers[0] + sequence * numbers[1]).to(tl.int32)
    return number


@triton.jit
def finite(top):
    """Return `top`, which is to be subtracted from numbers that are no larger; 0 where they are all
    minus infinity."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def program_at(axis: tl.constexpr):
    """Return the number of this program on one axis of the grid, as int64: what is multiplied with it
    may be an offset beyond 2^31."""
    return tl.program_id(axis).to(tl.int64)


@triton.jit
def load(at, there):
    """Load what stands at the pointers `at`, with 0 where it is not `there`."""
    return tl.load(at, mask=there, other=0)


@triton.jit
def load_logits(at, there):
    """Load numbers in fp32, with minus infinity where they are not `there`."""
    return tl.load(at, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def load_wide(at, there):
    """Load numbers in fp32, as `load` does."""
    return load(at, there).to(tl.float32)


@triton.jit
def product(a, b):
    """Return the matrix product a @ b in fp32. The interpreter has no bfloat16 arithmetic, so there
    the inputs become fp32 first."""
    if _interpreted:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def fused(a, b, c):
    """Return a * b + c in the dtype of `a`, rounded once. The interpreter rounds twice, so there
    numbers become fp32 first."""
    if _interpreted:
        result = (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    else:
        result = tl.fma(a, b.to(a.dtype), c.to(a.dtype))
    return result


@triton.jit
def rounded(x, like):
    """Round x (fp32) to the dtype that the pointer `like` points to, and return it in fp32."""
    return x.to(like.dtype.element_ty).to(tl.float32)
