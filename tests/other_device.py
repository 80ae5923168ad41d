"""A second device on a machine with a CPU alone: tensors that say they lie on `meta`, and hold numbers all the same.

Inside `other_device()`, whatever is made on `meta` or moved there holds its numbers in the CPU's memory. An operation
whose tensors lie on two devices fails, as between two GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.dispatched import mapped, tensors

OTHER = torch.device("meta")
CPU = torch.device("cpu")


class Elsewhere(Tensor):
    """A tensor of the second device; `numbers` holds them on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Elsewhere:
        kind = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "dtype": numbers.dtype}
        with torch.inference_mode(mode=False):  # or it could not be changed in place later
            made = Tensor._make_wrapper_subclass(cls, numbers.shape, **kind, device=OTHER)  # type: ignore[attr-defined]
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the numbers of its tensors; what it returns lies where they lie, or where it is told to."""
    places = [place for place in (*args, *kwargs.values()) if isinstance(place, torch.device)]
    given = [CPU if isinstance(value, torch.device) else value for value in args]
    plain = {name: CPU if isinstance(value, torch.device) else value for name, value in kwargs.items()}
    found = tensors((given, plain))
    there = [tensor for tensor in found if isinstance(tensor, Elsewhere)]
    moves = bool(places) or func is torch.ops.aten.copy_.default
    if not moves and there and any(x.dim() for x in found if not isinstance(x, Elsewhere)):
        raise RuntimeError(f"{func} is given tensors of two devices, of {[tuple(x.shape) for x in found]}")
    goes = places[0] == OTHER if places else isinstance(found[0], Elsewhere) if moves else bool(there)
    outer = {id(tensor.numbers): tensor for tensor in there}
    given, plain = mapped(lambda x: x.numbers if isinstance(x, Elsewhere) else x, (given, plain))
    result = func(*given, **plain)
    if places and goes and any(result is x for x in found):  # on the CPU both devices are one, so nothing was copied
        result = result.clone()

    def wrapped(x: Tensor) -> Tensor:
        if id(x) in outer and goes:  # an operation in place
            return outer[id(x)]
        return Elsewhere(x) if goes else x

    return mapped(wrapped, result)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Makes tensors of Python numbers, which torch makes on their device without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.tensor and given.get("device") is not None and torch.device(given["device"]) == OTHER:
            return torch.tensor(*args, **given | {"device": CPU}).to(OTHER)
        return func(*args, **given)


@contextmanager
def other_device() -> Iterator[None]:
    with _Numbers(), _Operations():
        yield


def move_layers(model: Any, first: int) -> None:
    """Move the layers of a model from number `first` on to the second device, with all that follows them. What a part
    is given comes there before it begins, as by accelerate's hooks; logits return."""
    decoder = model.get_decoder()
    for part in (*decoder.layers[first:], decoder.norm, model.get_output_embeddings()):
        for module in part.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(Elsewhere(weight.data), requires_grad=False))
        part.register_forward_pre_hook(_there, with_kwargs=True)
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output.to(CPU))


def _there(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(OTHER) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
