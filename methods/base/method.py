"""Defines what a method is: its hyper-parameters, what it demands of a model and a budget, and how
it makes its layers."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from methods.base.cost import Cost, CostError, LayerWorkload
from methods.base.layer import KVLayer
from methods.base.request import AttnInput, LayerSpec
from methods.base.state import CacheState
from methods.budget import Budget, BudgetError

Grids = Mapping[str, Sequence[Any]]  # parameter -> values
# tokens of a prompt longer than all sinks and windows, and of a budget
LONG, SOME = 1 << 20, 1 << 10


class _TupleForList(ABCMeta):
    """Turn lists among the arguments of a method's constructor, which yaml and callers pass, into
    tuples: a method is a value and must have a hash."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return super().__call__(*args, **{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Ability:
    """Something that some methods can do besides keeping and reading rows, as one object that a
    method lists (`Method.abilities`) or a setting adds (`Request.abilities`). methods/abilities
    explains the hooks and has one file for each."""

    # why a method cannot have it that does not say that it takes it
    lacking: ClassVar[str | None] = None
    # what it makes the method's budget count; None: prompt tokens
    budgets: ClassVar[str | None] = None

    @classmethod
    def refusal(cls, method: Method) -> str | None:
        """Return why `method` cannot have this ability from a setting; None if it can."""
        return method.takes.get(cls, cls.lacking)

    def error(self, method: Method, why: str) -> ValueError:
        """Return the error that tells a user that `method` cannot have this ability, for the reason
        `why`."""
        return ValueError(f"{type(method).__name__} cannot have {self}, for {why}: leave it out.")

    def check_model(self, spec: LayerSpec) -> None:
        """Raise `ValueError` if this ability does not suit a model with layers like `spec`."""

    def start(self, layer: KVLayer) -> Any:
        """Return the policy that holds this ability's state in `layer`, a `Layer` that has seen no
        token and binds it; None if this ability needs none there."""
        return None


Takes = Mapping[type[Ability], str | None]


class Method(metaclass=_TupleForList):
    """Hold a method's hyper-parameters: a frozen dataclass whose defaults are the values of its
    yaml.

    The budget is not among them. The request brings it, and it limits the same thing for every
    method: how many prompt tokens one selecting head may read. If query heads select, a KV head
    reads the union of its group, which is counted too."""

    uses_budget: ClassVar[bool] = True
    # the prompt's outputs equal Full's, so prefills can be shared
    dense_prefill: ClassVar[bool] = True
    # each query of a prompt reads what it would read in a step: chunks change nothing under a budget of so many tokens
    by_query: ClassVar[bool] = False
    # a layer seals as soon as its prompt is complete, wherever its rows lie
    closes_early: ClassVar[bool] = False
    # from turn to turn, keys and values stay as the model computed them
    rows_stay: ClassVar[bool] = False
    # what it holds can lose the oldest tokens of a history
    truncates: ClassVar[bool] = True
    # those that it has whatever the settings (methods/abilities)
    abilities: ClassVar[tuple[Ability, ...]] = ()
    # those that settings give it: None, or the reason for which it cannot have one
    takes: ClassVar[Takes] = {}
    # why it means nothing where key and value of a token are one latent (`LayerSpec.values_in_keys`);
    # None: it runs there
    no_latents: ClassVar[str | None] = None
    # its own names for `sinks` and `recent_ratio`, if it has them
    window_names: ClassVar[Mapping[str, str]] = {}
    # parameter -> values that harness.tune tries; none changes what the budget limits
    tunable: ClassVar[Grids] = {}

    @property
    def offloads(self) -> bool:
        """Return whether this method can hold tokens in host memory or on disk (placement=host and
        disk)."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """Return what this method must know of a model, though some models do not let it be found
        out: ROTATION if it rotates keys or queries itself, QUERIES if it computes queries."""
        return ()

    @property
    def smallest_budget(self) -> int:
        """Return the smallest budget, in prompt tokens, that has room for the tokens that this
        method always reads, such as first tokens and windows."""
        return 1

    @property
    def calibration_tokens(self) -> int:
        """Return how many tokens of calibration text `prepare` observes at most; 0 if the method
        needs no calibration."""
        return 0

    def trained_budget(self, spec: LayerSpec) -> int | None:
        """Return the budget that a model with layers like `spec` was trained with, which holds where
        nobody names another; None if there is none, so that one must be named."""
        return None

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
        given = {
            own: asked[name] for name, own in self.window_names.items() if asked[name] is not None
        }
        return replace(self, **given) if given else self  # type: ignore[type-var]

    def prepare(
        self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]
    ) -> object:
        """Compute what a method needs once per model, such as offline statistics; its layers then
        find the result in `Request.prepared`. `observe(tokens)` runs calibration text and yields
        each layer's input."""
        return None

    def measured(self, prepared: object) -> Mapping[str, object]:
        """Return, as parameters of this method, what `prepare` has timed on this machine: with them
        a run can be repeated elsewhere."""
        return {}

    @abstractmethod
    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        """Return a new layer per spec, for one batch. Layers that refer to one another are
        connected only here."""

    def reads_all(self, sealed: int, tokens: int, pruned: bool = False) -> bool:
        """Return whether a prompt of `sealed` tokens is read whole under a budget of `tokens`. That
        is so if the budget covers the prompt and no choice is `pruned` (`Budget.mass`). It is also
        so if the budget cannot hold the sinks and windows, so that nothing could be chosen: a share
        of a short prompt may be that small. Such a prompt is not refused, and the reason is
        recorded (`whole_because`)."""
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
        raise CostError(
            f"{type(self).__name__} declares no cost, so its budget cannot stand for bytes: count tokens "
            "(budget=0.2 budget_rule=read)."
        )

    def at_communication(self, share: float, head_dim: int) -> Method:
        """Return this method with its parameters set so that choosing tokens moves `share` of the
        key cache (taken in 16 bits) per step. The paper of PQCache (arXiv 2407.12820) compares
        methods at the same share.

        Methods that move nothing to choose tokens are returned as they are, unless that paper
        compensates them."""
        return self

    def refuse_model(self, specs: Sequence[LayerSpec]) -> None:
        """Raise `ValueError` if this method means nothing on a model whose layers are `specs`, those
        that it would serve, or if a parameter does not suit them (`check_model`)."""
        if specs[0].values_in_keys and self.no_latents is not None:
            raise ValueError(
                f"{type(self).__name__} does not run on latent attention (MLA), for {self.no_latents}: choose another "
                "method, such as SnapKV or Quest."
            )
        self.check_model(specs[0])
        if not self.dense_prefill and any(spec.borrowers for spec in specs):
            raise ValueError(
                f"{type(self).__name__} computes a prompt by what a layer's own queries choose, and other layers of "
                "this model read its keys and values: choose a method that computes prompts as Full does, as SnapKV."
            )

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

    def check(self, budget: Budget | None, layer: int = 0) -> None:
        """Raise `BudgetError` if this method uses a budget and has none, since it would silently read
        everything, or if `budget` cannot hold this method's sinks and windows even in a
        long prompt: so few tokens are a mistake in the configuration. Prompts that are too short
        for a share are handled by `reads_all`."""
        name = type(self).__name__
        if budget is None and self.uses_budget:
            raise BudgetError(
                f"{name} was given no budget: set budget=0.2 for a fifth of the prompt, budget=512 for so many tokens "
                "of it, or budget=1.0 for all of it."
            )
        if budget is None:
            return
        tokens = budget.tokens(LONG, layer)
        if tokens < self.smallest_budget:
            has_parameters = bool(getattr(self, "__dataclass_fields__", ()))
            rows = next(
                (ability.budgets for ability in self.abilities if ability.budgets), "prompt tokens"
            )
            needs = "its sinks and windows need" if has_parameters else "it needs at least"
            smaller = ", or make the method's windows smaller" * has_parameters
            raise BudgetError(
                f"budget={budget} gives {name} {tokens} {rows}, but {needs} {self.smallest_budget}: set budget to at "
                f"least {budget.least(self.smallest_budget, LONG, layer)}{smaller}."
            )


def paper_differs(method: Method) -> bool:
    """Return whether the paper of `method` counts its budget differently from the prompt tokens that
    a step reads: without sinks, for example, or including an index."""
    return method.paper_tokens(lambda tokens: SOME, LONG) != SOME


def refuse_other_than_method(given: object) -> None:
    """Raise `ValueError` unless `given` is an instance of `Method`. What is easily passed instead
    is a method's name, or its class."""
    if isinstance(given, Method):
        return
    what = (
        f"{given.__name__} is a class" if isinstance(given, type) else f"{given!r} is not a method"
    )
    raise ValueError(f"{what}: pass an instance of a method, as SnapKV().")
