"""The contract of a KV-cache method. docs/method_contract.md gives the reasons.

Letters in shapes: B batch, H query heads, G key/value heads, g = H/G, T new tokens, S stored tokens, K chosen
tokens, D head size, E model width. KV head i serves query heads i*g ... i*g+g-1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from methods.budget import Budget, BudgetError
from methods.card import Card
from methods.clock import Clock

Placement = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a layer knows before it sees a token."""

    index: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the logits, usually head_dim ** -0.5
    rope: Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [P] -> cos, sin, each [1 P D], as the model makes them
    project_query: Callable[[Tensor], Tensor]  # this layer's [B T E] input -> q [B H T D] before the rotation

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass
class Traffic:
    """Bytes that crossed between host and device, counted where they move."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    looked_up: int = 0  # rows that a cache on the device was asked for
    found: int = 0  # and had

    @property
    def total_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one batch of equal-length sequences asks of a method. `capacity`: prompt and new tokens of all turns."""

    batch: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    budget: Budget | None = None
    stale_by: int = 0  # a selecting method may use a selection for so many further steps
    placement: Placement = "device"
    prepared: object = None  # what the method's `prepare` returned for this model
    traffic: Traffic = field(default_factory=Traffic)
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, slots=True)
class AttnInput:
    """What one attention call of one layer sees."""

    q: Tensor  # [B H T D], rotated
    k: Tensor  # [B G T D], rotated; the new tokens only
    v: Tensor  # [B G T D]
    cos: Tensor  # [1|B T D]
    sin: Tensor  # [1|B T D]
    hidden: Tensor  # [B T E], the normalised input of the projections; must not be kept
    start: int  # position of the first new token


@dataclass(frozen=True, slots=True)
class Case:
    """What a cost is asked for: one layer and one sequence, its prompt sealed."""

    spec: LayerSpec
    sealed: int  # prompt tokens
    budget: int  # prompt tokens a selecting head of this layer may read
    placement: Placement
    element_bytes: int
    reserve: int = 0  # rows kept free for generated tokens

    @property
    def capacity(self) -> int:
        return self.sealed + self.reserve

    @property
    def row_bytes(self) -> int:
        """K and V of one token."""
        return 2 * self.spec.num_kv_heads * self.spec.head_dim * self.element_bytes


class Cost(NamedTuple):
    """Bytes held, and bytes that cross between host and device in a step. `+` adds them up."""

    device_bytes: int
    host_bytes: int = 0
    moved_bytes_per_step: int = 0

    def __add__(self, other: tuple[int, ...]) -> Cost:  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class CostError(ValueError):
    """A cost cannot be had: no formula, or no parameter value that meets it."""


class Attended(NamedTuple):
    """Tokens one selecting head read in the last decode step (the mean where heads differ). That is a KV head, or a
    query head where a method lets each choose; what a KV head then reads is in `read_positions`."""

    prompt: float  # of the sealed prompt: what the budget limits
    generated: float  # since the seal, the current token included


class KVLayer(ABC):
    """Keys and values of one layer for one batch, and attention over them.

    Phases: `prefill` (once, or once per chunk), `seal`, `decode` per token; for a further turn the same again. The
    phase is said, never guessed from a shape. All inputs and outputs are on `request.device`.
    """

    def __init__(self, spec: LayerSpec, request: Request) -> None:
        self.spec = spec
        self.request = request
        self.fallback: str | None = None  # what this layer does in place of its method, and why

    @abstractmethod
    def absorb(self, x: AttnInput) -> None:
        """Take in the next prompt chunk, without attending: what a shared prefill calls."""

    @abstractmethod
    def prefill(self, x: AttnInput) -> Tensor:
        """Take in the next prompt chunk and attend causally. -> [B H T D]"""

    @abstractmethod
    def seal(self) -> None:
        """The prompt is complete: index, compress, evict, move."""

    @abstractmethod
    def decode(self, x: AttnInput) -> Tensor:
        """Take in one token and attend. -> [B H 1 D]"""

    @property
    @abstractmethod
    def attended(self) -> Attended: ...

    @property
    def reading(self) -> tuple[float | Tensor, float]:
        """`attended` without waiting, for use between steps: where only the device knows how many prompt tokens were
        read, they are a tensor [B] that the next step may overwrite."""
        return self.attended

    @abstractmethod
    def read_positions(self) -> Tensor | None:
        """Prompt positions the last step read, [B G K] without repeats, -1 where a head read fewer; None for all."""

    def unrepeatable(self) -> str | None:
        """Why a decode step of this sealed layer cannot be recorded once and repeated (methods/clock.py), or None."""
        return f"{type(self).__name__} does not say that its step can be"

    def count_repeated(self, steps: int) -> None:
        """So many recorded steps ran without `decode`: bring up to date what it counts in Python."""
        raise NotImplementedError(f"{type(self).__name__} says that its step can be repeated, and counts no repeats")


class Method(ABC):
    """A method's hyper-parameters: a frozen dataclass whose defaults are the values of its yaml.

    The budget is not among them: the request brings it, and it limits the same thing for every method: what one head
    that selects may read. Where that is a query head, a KV head reads the union of its group, which is counted as well.
    """

    uses_budget: ClassVar[bool] = True
    dense_prefill: ClassVar[bool] = True  # the prompt's outputs are Full's, so a shared prefill serves this method
    offloads: ClassVar[bool] = False  # placement=host is meant for it
    exact_keys: ClassVar[bool] = True  # a step attends with the true keys of the tokens it reads, at their positions
    simulated: ClassVar[bool] = False  # the cost is not paid in this code: speed cells stay empty
    card: ClassVar[Card | None] = None
    window_names: ClassVar[Mapping[str, str]] = {}  # its own names for `sinks` and `recent_ratio`, if it has them

    @property
    def smallest_budget(self) -> int:
        """The least number of prompt tokens that holds this method's sinks and windows."""
        return 1

    @property
    def paper_leaves_out(self) -> bool:
        """Whether the paper's budget leaves out prompt tokens that a step reads all the same, sinks for example."""
        return False

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """What a KV head reads of `sealed` prompt tokens where the budget is counted as in the paper.

        `budget(n)`: the budget of n tokens, n itself where it covers them.
        """
        return budget(sealed)

    def with_windows(self, **asked: int | float | None) -> Method:
        """This method with `sinks` first tokens and `recent_ratio` of the rest for the window, where it has such
        parameters; None leaves its own."""
        own = {own: asked[name] for name, own in self.window_names.items() if asked[name] is not None}
        return replace(self, **own) if own else self  # type: ignore[type-var]

    def prepare(self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]) -> object:
        """Work done once per model and kept: `observe(tokens)` runs calibration text, yields each layer's input."""
        return None

    def measured(self, prepared: object) -> Mapping[str, object]:
        """Of `prepared`, what was timed on this machine: parameters with which the run can be repeated elsewhere."""
        return {}

    @abstractmethod
    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        """Fresh state for one batch, a layer per spec. Layers may be linked with one another here, only here."""

    def reads_whole(self, case: Case) -> bool:
        """Whether the budget leaves nothing to choose."""
        return not self.uses_budget or case.budget >= case.sealed or case.sealed <= self.smallest_budget

    def cost(self, case: Case) -> Cost:
        """The bytes that `case` takes, by formula. Where a step's traffic depends on the text, the most it can be."""
        raise CostError(f"{type(self).__name__} declares no cost, so align=tokens is all it can do.")

    def at_communication(self, share: float, head_dim: int) -> Method:
        """This method where scoring moves `share` of the 16-bit key cache per step, as in PQCache's comparison.

        Itself where scoring moves nothing and the comparison asks for no compensation.
        """
        return self

    def check_model(self, spec: LayerSpec) -> None:  # noqa: B027 (most methods suit every model)
        """Raise `ValueError` where a parameter does not suit a model with such layers; no weights are needed."""

    def check(self, budget: Budget | None, sealed: int, layer: int = 0) -> None:
        """Raise `BudgetError` where `budget` cannot hold this method's sinks and windows for `sealed` prompt tokens."""
        if budget is None or sealed <= self.smallest_budget:
            return  # such a short prompt is read whole
        tokens = budget.tokens(sealed, layer)
        if tokens < self.smallest_budget:
            number, share = budget.least(self.smallest_budget, sealed, layer)
            raise BudgetError(
                f"budget={budget} gives {type(self).__name__} {tokens} of {sealed} prompt tokens, but its sinks and "
                f"windows need {self.smallest_budget}: set budget to at least {number} (or a share of {share}), or "
                "make the method's windows smaller."
            )
