"""Checks what the policies of a method return, while its first example runs (`Checks` in
methods/base/state.py).

Nothing else would notice a row that is named twice, or one that no token has: the rows of all heads
lie one after the other, so a number that is out of range for one head is a token of the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from methods.base import AttnInput, KVLayer
from methods.pools import KVStore


class ReturnedError(ValueError):
    """Report that a method's policy (what it decides in one layer) returned what its contract rules
    out: which policy, in which layer, and what it returned."""


OF_A_STEP = "likelihoods, choices and shared questions would not find them again"


@contextmanager
def unwritten(layer: KVLayer, what: str = "a step", why: str = OF_A_STEP) -> Iterator[None]:
    """Raise `ReturnedError` if this block changes rows that the store of `layer` holds already,
    other than by `KVStore.write`. For the message, `what` says in words what runs in the block, and
    `why` the reason for which it must not do so."""
    store = getattr(layer, "store", None)
    stores = getattr(store, "stores", [store]) if isinstance(store, KVStore) else []
    held = [(name, getattr(one, name)[:, :, : one.length]) for one in stores for name in one.steady]
    before = [rows.clone() for _, rows in held]
    yield
    for (name, rows), old in zip(held, before, strict=True):
        if not _same(rows, old):
            method = type(getattr(layer, "method", layer)).__name__
            rows_of = "keys" if name == "k_rows" else "values"
            raise ReturnedError(
                f"In layer {layer.spec.index} of {method}, {what} changed stored {rows_of} in place, so {why}: "
                "write with layer.write(rows, k=..., v=...)."
            )


@contextmanager
def unchanged(layer: KVLayer, x: AttnInput) -> Iterator[None]:
    """Raise `ReturnedError` if this block, in which `layer` takes `x` in, changes a tensor of `x` in
    place. Other methods of a shared prefill read these, so they are put right first."""
    before = {name: getattr(x, name).clone() for name in ("q", "k", "v", "hidden")}
    try:
        yield
    finally:
        for name, old in before.items():
            given = getattr(x, name)
            if not _same(given, old):
                given.copy_(old)
                raise ReturnedError(
                    f"In layer {layer.spec.index} of {type(getattr(layer, 'method', layer)).__name__}, x.{name} was "
                    "changed in place, and other methods of a shared prefill and the exact attention of fidelity read "
                    f"it afterwards: change a copy, x.{name}.clone(), and what is stored by layer.write(rows, k=..., "
                    "v=...)."
                )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, or the same bytes, so that NaN equals
    itself."""
    # the former first, for it is several times as fast
    return torch.equal(one, other) or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_rows(
    given: object, whose: str, *, batch: int, heads: Sequence[int], tokens: int | None, device: torch.device,
    count: int | None = None, ascending: bool = False, gaps: bool = False,
) -> None:  # fmt: skip
    """Raise `ReturnedError` unless `given` is an int64 tensor [batch, heads, K] whose numbers, for
    each head, differ and lie from 0 to below `tokens` (None: any numbers). `whose`: who returned
    it, in words, for the message. `heads`: the numbers of heads that are allowed. `count`: the
    wanted K; None for any. `gaps`: -1 may stand where a head has fewer."""
    fault = None
    if not isinstance(given, Tensor):
        fault = f"a {type(given).__name__}"
    elif given.dtype != torch.int64:
        fault = f"a tensor of {str(given.dtype).removeprefix('torch.')}"
    elif given.device != device:
        fault = f"a tensor on {given.device}"
    elif (
        given.dim() != 3
        or len(given) != batch
        or given.shape[1] not in heads
        or count not in (None, given.shape[2])
    ):
        fault = f"a tensor of shape {list(given.shape)}"
    elif tokens is not None:
        fault = _wrong_number(given, tokens, ascending, gaps)
    if fault is not None:
        shape = " or ".join(
            f"[{batch}, {number}, {count or 'K'}]" for number in dict.fromkeys(heads)
        )
        numbers = "numbers" if tokens is None else f"different numbers from 0 to {tokens - 1}"
        more = ", -1 for none" * gaps + ", ascending" * ascending
        raise ReturnedError(
            f"{whose} {fault}. Wanted are {numbers} for each head{more}, as int64 {shape} on {device}."
        )


def check_rows_per_head(
    given: Sequence[object], whose: str, tokens: Sequence[int], heads: int, device: torch.device
) -> None:  # fmt: skip
    """Raise `ReturnedError` unless `given` has a tensor of row numbers for each head of each sequence,
    below that head's entry in `tokens`, and all together are a multiple of the number of `heads`."""
    if len(given) != len(tokens):
        raise ReturnedError(
            f"{whose} rows of {len(given)} heads. Wanted are those of {len(tokens)}."
        )
    for number, (rows, count) in enumerate(zip(given, tokens, strict=True)):
        listed = rows[None, None] if isinstance(rows, Tensor) else rows
        name = f"{whose}, for rows {number},"
        check_rows(listed, name, batch=1, heads=(1,), tokens=count, device=device, ascending=True)
    together = sum(len(rows) for rows in given if isinstance(rows, Tensor))
    if together % heads:
        raise ReturnedError(
            f"{whose} {together} rows of {heads} heads. Wanted is a multiple of {heads}."
        )


def _wrong_number(given: Tensor, tokens: int, ascending: bool, gaps: bool) -> str | None:
    """Return in words which number is out of range, repeated or out of order, and for which head
    and sequence; None if all are right. Arguments as in `check_rows`."""
    ordered = given if ascending else given.sort(-1).values
    before, after = ordered[..., :-1], ordered[..., 1:]
    outside = (given >= tokens) | (given < (-1 if gaps else 0))
    for wrong, x, says in (
        (outside, given, ""),
        ((before == after) & (before >= 0), before, " twice"),
        (before > after, before, " before a smaller number"),
    ):
        if wrong.any():
            sequence, head, place = wrong.nonzero()[0].tolist()
            return f"{int(x[sequence, head, place])}{says} for head {head} of sequence {sequence}"
    return None
