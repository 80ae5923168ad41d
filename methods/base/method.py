"""Defines a method: its hyper-parameters, what it asks of a model and a budget, and how it starts."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from methods.base.cost import Cost, CostError, LayerWorkload, PeakExtra
from methods.base.layer import KVLayer
from methods.base.request import AttnInput, LayerSpec
from methods.base.state import CacheState
from methods.budget import Budget, BudgetError

Grids = Mapping[str, Sequence[Any]]  # parameter -> values
LONG, SOME = 1 << 20, 1 << 10  # tokens of a prompt that no sinks or windows fill, and of a budget


class _TupleForList(ABCMeta):
    """Turns lists, which yaml and callers bring, into tuples: a method is a value and must have a hash."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return super().__call__(*args, **{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


class Method(metaclass=_TupleForList):
    """Holds a method's hyper-parameters: a frozen dataclass whose defaults are the values of its yaml.

    The budget is not among them. The request brings it, and it limits the same thing for every method: what one head
    that selects may read. Where that is a query head, a KV head reads the union of its group, which is counted as well.
    """

    uses_budget: ClassVar[bool] = True
    dense_prefill: ClassVar[bool] = True  # the prompt's outputs are Full's, so a shared prefill serves this method
    selects: ClassVar[bool] = True  # a step reads what it chooses, and `reuse_steps` lets further steps read the same
    closes_early: ClassVar[bool] = False  # a layer seals as soon as it is complete, wherever its rows lie
    rows_stay: ClassVar[bool] = False  # from turn to turn, a token's keys and values stay what the model made them
    generated_refusal: ClassVar[str | None] = None  # why it must keep all generated tokens; None: it need not
    window_names: ClassVar[Mapping[str, str]] = {}  # its own names for `sinks` and `recent_ratio`, if it has them
    tunable: ClassVar[Grids] = {}  # values that harness.tune tries, by parameter; none changes what the budget rules

    @property
    def offloads(self) -> bool:
        """Say whether placement=host and disk are meant for this method."""
        return False

    @property
    def asks_ahead(self) -> bool:
        """Say whether a step asks for a layer's rows while the layer before computes, which may hide them."""
        return False

    @property
    def encodes(self) -> bool:
        """Say whether a codec is meant for this method: it has tokens that a step reads by choice alone."""
        return False

    @property
    def smallest_budget(self) -> int:
        """Return the least number of prompt tokens that holds this method's sinks and windows."""
        return 1

    @property
    def calibration_tokens(self) -> int:
        """Return how many tokens of text `prepare` observes at most; a run hands over none if this is 0."""
        return 0

    @property
    def paper_differs(self) -> bool:
        """Say whether the paper's budget is something else than the prompt tokens that a step reads: it leaves out
        sinks, for example, or counts an index too."""
        return self.paper_tokens(lambda tokens: SOME, LONG) != SOME

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return what a KV head reads of `sealed` prompt tokens when the budget is counted as in the paper.

        `budget(n)` is the budget of n tokens, n itself where it covers them.
        """
        return budget(sealed)

    def with_windows(self, **asked: int | float | None) -> Method:
        """Return this method with `sinks` first tokens, and with `recent_ratio` of the rest for the window, if it has
        such parameters; None leaves its own."""
        given = {own: asked[name] for name, own in self.window_names.items() if asked[name] is not None}
        return replace(self, **given) if given else self  # type: ignore[type-var]

    def prepare(self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]) -> object:
        """Do the work that is done once per model and kept. `observe(tokens)` runs calibration text and yields each
        layer's input."""
        return None

    def measured(self, prepared: object) -> Mapping[str, object]:
        """Return the parts of `prepared` that were timed on this machine, as parameters with which the run can be
        repeated elsewhere."""
        return {}

    @abstractmethod
    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        """Return fresh layers for one batch, one per spec. Only here may layers be linked with one another."""

    def reads_all(self, sealed: int, tokens: int) -> bool:
        """Say whether a budget of `tokens` leaves out nothing of a prompt of `sealed` tokens: it covers the prompt, or
        it cannot hold the sinks and windows, so that nothing could be chosen. A share of a short prompt is such a
        budget; a prompt that is read whole for this reason is counted (`whole_because`), and no length is refused."""
        return tokens >= sealed or tokens < self.smallest_budget

    def whole_because(self, sealed: int, tokens: int) -> str:
        """Return why a prompt of `sealed` tokens is read whole under a budget of `tokens` that does not cover it."""
        return (
            f"all is read: the budget gives {tokens} of {sealed} prompt tokens, and the method's sinks and windows "
            f"take {self.smallest_budget}"
        )

    def reads_whole(self, case: LayerWorkload) -> bool:
        """Say whether the budget leaves nothing to choose."""
        return not self.uses_budget or self.reads_all(case.sealed, case.budget)

    def cost(self, case: LayerWorkload) -> Cost:
        """Return the bytes that `case` takes, by formula. Where a step's traffic depends on the text, it is the most
        that it can be."""
        raise CostError(f"{type(self).__name__} declares no cost, so align=tokens is all it can do.")

    def transient(self, case: LayerWorkload, chunk: int) -> PeakExtra:
        """Return the bytes that `case` takes for a while, by formula, when its prompt comes `chunk` tokens at a time.
        What `cost` says is counted without this, and a step is taken to need less than a seal."""
        return PeakExtra()

    def at_communication(self, share: float, head_dim: int) -> Method:
        """Return this method with scoring that moves `share` of the 16-bit key cache per step, as in PQCache's
        comparison.

        It is the method itself where scoring moves nothing and the comparison asks for no compensation.
        """
        return self

    def check_model(self, spec: LayerSpec) -> None:
        """Raise `ValueError` if a parameter does not suit a model with such layers; no weights are needed."""

    def require_budget(self, budget: Budget | None) -> None:
        """Raise `BudgetError` if this method uses a budget and was given none: it would read everything, as Full does,
        and nobody would know."""
        if self.uses_budget and budget is None:
            raise BudgetError(
                f"{type(self).__name__} was given no budget: set budget=0.2 for a fifth of the prompt, budget=512 for "
                "so many tokens of it, or budget=1.0 for all of it."
            )

    def check(self, budget: Budget | None, layer: int = 0) -> None:
        """Raise `BudgetError` if `budget` cannot hold this method's sinks and windows, however long a prompt is: so
        few tokens are a mistake in the configuration. Which prompts are too short for a share, `reads_all` says."""
        if budget is not None and budget.generated is not None and self.generated_refusal is not None:
            name = type(self).__name__
            raise BudgetError(
                f"{name} cannot drop generated tokens, for {self.generated_refusal}: leave out budget_generated."
            )
        if budget is None:
            return
        tokens = budget.tokens(LONG, layer)
        if tokens < self.smallest_budget:
            raise BudgetError(
                f"budget={budget} gives {type(self).__name__} {tokens} prompt tokens, but its sinks and windows need "
                f"{self.smallest_budget}: set budget to at least {budget.least(self.smallest_budget, LONG, layer)}, or "
                "make the method's windows smaller."
            )


def refuse_other_than_method(given: object) -> None:
    """Raise `ValueError` for what is easily passed in place of a method: its name, or its class."""
    if isinstance(given, Method):
        return
    what = f"{given.__name__} is a class" if isinstance(given, type) else f"{given!r} is no method"
    raise ValueError(f"{what}: pass an instance of a method, as SnapKV().")
