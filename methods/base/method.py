"""Defines what a method is: its hyper-parameters, what it demands of a model and a budget, and how
it makes its layers."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from methods.base.cost import Cost, CostError, LayerWorkload
from methods.base.layer import KVLayer
from methods.base.request import AttnInput, LayerSpec, Piece, RepeatPrompts
from methods.base.state import CacheState
from methods.budget import Budget, BudgetError

Grids = Mapping[str, Sequence[Any]]  # parameter -> values
LONG, SOME = 1 << 20, 1 << 10  # tokens of a prompt longer than all sinks and windows, and of a budget


class _TupleForList(ABCMeta):
    """Turn lists among the arguments of a method's constructor, which yaml and callers pass, into
    tuples: a method is a value and must have a hash."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return super().__call__(*args, **{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


class Method(metaclass=_TupleForList):
    """Hold a method's hyper-parameters: a frozen dataclass whose defaults are the values of its
    yaml.

    The budget is not among them. The request brings it, and it limits the same thing for every
    method: how many prompt tokens one selecting head may read. If query heads select, a KV head
    reads the union of its group, which is counted too."""

    uses_budget: ClassVar[bool] = True
    dense_prefill: ClassVar[bool] = True  # the prompt's outputs equal Full's, so prefills can be shared
    closes_early: ClassVar[bool] = False  # a layer seals as soon as its prompt is complete, wherever its rows lie
    rows_stay: ClassVar[bool] = False  # from turn to turn, keys and values stay as the model computed them
    generated_refusal: ClassVar[str | None] = None  # why it takes no budget_generated; None: it takes one
    counts_answer: ClassVar[bool] = False  # the budget is all rows of a KV head, prompt and answer
    repeats: ClassVar[bool] = False  # the model reads its prompt again before the seal, piece by piece (`repetitions`)
    window_names: ClassVar[Mapping[str, str]] = {}  # its own names for `sinks` and `recent_ratio`, if it has them
    tunable: ClassVar[Grids] = {}  # parameter -> values that harness.tune tries; none changes what the budget limits

    @property
    def offloads(self) -> bool:
        """Return whether this method can hold tokens in host memory or on disk (placement=host and
        disk)."""
        return False

    @property
    def asks_ahead(self) -> bool:
        """Return whether a decode step asks for the tokens that a layer will read while the layer
        before it computes, which may hide their transfer."""
        return False

    @property
    def encodes(self) -> bool:
        """Return whether this method supports a codec, which holds tokens in fewer bits: those that
        a step reads only if they are chosen, or, of a method that evicts at the seal, those that
        stay. Its policies then attend by `Storage.attend_all`, which reads encoded tokens too."""
        return False

    @property
    def mass_refusal(self) -> str | None:
        """Return why a step of this method cannot read only as many of the tokens that it chose as
        carry a share of their weights (the setting `budget_mass`); None if it can."""
        return "it has no second stage that prunes what it chose by estimated weights"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return what this method must be told of a model and cannot be told of each: ROTATION if it
        rotates keys or queries itself, QUERIES if it computes queries."""
        return ()

    @property
    def smallest_budget(self) -> int:
        """Return the smallest budget, in prompt tokens, that has room for the tokens that this
        method always reads, such as first tokens and windows."""
        return 1

    @property
    def extra_rows(self) -> int:
        """Return how many rows a KV head may hold beyond a budget that counts prompt and answer
        (`counts_answer`), before rows are dropped down to the budget."""
        return 0

    @property
    def calibration_tokens(self) -> int:
        """Return how many tokens of calibration text `prepare` observes at most; 0 if the method
        needs no calibration."""
        return 0

    @property
    def paper_differs(self) -> bool:
        """Return whether the paper counts its budget differently from the prompt tokens that a step
        reads: without sinks, for example, or including an index."""
        return self.paper_tokens(lambda tokens: SOME, LONG) != SOME

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return how many of `sealed` prompt tokens a KV head reads when the budget is counted as
        in this method's paper, which may leave out first tokens or include an index.

        `budget(n)` is the budget in tokens for a prompt of n tokens, n itself where it covers
        them."""
        return budget(sealed)

    def with_windows(self, **asked: int | float | None) -> Method:
        """Return this method with other values for the parameters that the settings `sinks` (first
        tokens) and `recent_ratio` (share of the rest for the window at the end) name, so far as it
        has such parameters; None leaves a value as it is."""
        given = {own: asked[name] for name, own in self.window_names.items() if asked[name] is not None}
        return replace(self, **given) if given else self  # type: ignore[type-var]

    def prepare(self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]) -> object:
        """Compute what a method needs once per model, such as offline statistics; its layers then
        find the result in `Request.prepared`. `observe(tokens)` runs calibration text and yields
        each layer's input."""
        return None

    def measured(self, prepared: object) -> Mapping[str, object]:
        """Return, as parameters of this method, what `prepare` has timed on this machine: with them
        a run can be repeated elsewhere."""
        return {}

    def repetitions(self, prompt: Tensor, prompts: RepeatPrompts) -> Iterator[tuple[Tensor, Piece]]:
        """Yield what the model reads after a complete prompt [B S], before it is sealed: token ids
        [B T], which end with a piece of the prompt, and the place of that piece. The layers see them
        in `KVLayer.repeat`, and nothing of them is stored."""
        yield from ()

    def repeated_tokens(self, sealed: int) -> int:
        """Return how many tokens the model reads at a time, at most, when it repeats a prompt of
        `sealed` tokens (`repetitions`)."""
        return 0

    @abstractmethod
    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        """Return a new layer per spec, for one batch. Layers that refer to one another are
        connected only here."""

    def reads_all(self, sealed: int, tokens: int, pruned: bool = False) -> bool:
        """Return whether a budget of `tokens` leaves out nothing of a prompt of `sealed` tokens: it
        covers the prompt and no choice is `pruned` (`Budget.mass`), or it cannot hold the sinks and
        windows, so that nothing could be chosen. The latter happens with a share of a short prompt;
        such a prompt is read whole, for a reason that is recorded (`whole_because`), and no length
        is refused."""
        return tokens < self.smallest_budget or (tokens >= sealed and not pruned)

    def whole_because(self, sealed: int, tokens: int) -> str:
        """Return why a prompt of `sealed` tokens is read whole under a budget of `tokens` that does
        not cover it."""
        return (
            f"all is read: the budget gives {tokens} of {sealed} prompt tokens, and the method's sinks and windows "
            f"take {self.smallest_budget}"
        )

    def reads_whole(self, case: LayerWorkload) -> bool:
        """Return whether every step of `case` reads the whole prompt, because the budget leaves
        nothing to choose."""
        return not self.uses_budget or self.reads_all(case.sealed, case.budget, case.estimated)

    def cost(self, case: LayerWorkload) -> Cost:
        """Return by formula what a layer holds, and what a step moves and reads. Where the moved
        bytes depend on the text, they are an upper bound. Raises `CostError` if the method declares
        no formula."""
        raise CostError(f"{type(self).__name__} declares no cost, so align=tokens is all it can do.")

    def at_communication(self, share: float, head_dim: int) -> Method:
        """Return this method with its parameters set so that choosing tokens moves `share` of the
        key cache (taken in 16 bits) per step. The paper of PQCache (arXiv 2407.12820) compares
        methods at the same share.

        Methods that move nothing to choose tokens are returned as they are, unless that paper
        compensates them."""
        return self

    def check_model(self, spec: LayerSpec) -> None:
        """Raise `ValueError` if a parameter does not suit a model with layers like `spec`; no
        weights are needed."""

    def require_known(self, specs: Sequence[LayerSpec], name: str = "") -> None:
        """Raise `ValueError` if this method needs something of a model that could not be found
        out. `name`: what the error calls this method, by default its class."""
        for what in self.needs:
            if any(what in spec.unknown for spec in specs):
                raise ValueError(
                    f"{name or type(self).__name__} must know {what}, which could not be found out: choose a method "
                    "that does not need it, such as SnapKV, or another model."
                )

    def require_budget(self, budget: Budget | None) -> None:
        """Raise `BudgetError` if this method uses a budget and has none: without one it would
        silently read everything."""
        if self.uses_budget and budget is None:
            raise BudgetError(
                f"{type(self).__name__} was given no budget: set budget=0.2 for a fifth of the prompt, budget=512 for "
                "so many tokens of it, or budget=1.0 for all of it."
            )

    def check(self, budget: Budget | None, layer: int = 0) -> None:
        """Raise `BudgetError` if `budget` cannot hold this method's sinks and windows even in a
        long prompt (so few tokens are a mistake in the configuration), or if it limits generated
        tokens and the method cannot drop any. Prompts that are too short for a share are handled by
        `reads_all`."""
        name = type(self).__name__
        if budget is None:
            return
        refusal = "its budget counts them already" if self.counts_answer else self.generated_refusal
        if budget.generated is not None and refusal is not None:
            raise BudgetError(f"{name} takes no budget of generated tokens, for {refusal}: leave out budget_generated.")
        if budget.mass is not None and self.mass_refusal is not None:
            raise BudgetError(
                f"{name} takes no budget_mass={budget.mass}, for {self.mass_refusal}: leave it out, or "
                "choose Oracle, Quest or PQCache."
            )
        tokens = budget.tokens(LONG, layer)
        if tokens < self.smallest_budget:
            has_parameters = bool(getattr(self, "__dataclass_fields__", ()))
            rows = "rows of prompt and answer" if self.counts_answer else "prompt tokens"
            needs = "its sinks and windows need" if has_parameters else "it needs at least"
            smaller = ", or make the method's windows smaller" * has_parameters
            raise BudgetError(
                f"budget={budget} gives {name} {tokens} {rows}, but {needs} {self.smallest_budget}: set budget to at "
                f"least {budget.least(self.smallest_budget, LONG, layer)}{smaller}."
            )


def refuse_other_than_method(given: object) -> None:
    """Raise `ValueError` unless `given` is an instance of `Method`. What is easily passed instead
    is a method's name, or its class."""
    if isinstance(given, Method):
        return
    what = f"{given.__name__} is a class" if isinstance(given, type) else f"{given!r} is not a method"
    raise ValueError(f"{what}: pass an instance of a method, as SnapKV().")
