"""Lists the checks of a method's contract (docs/method_contract.md)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.checks.answers import apart, seen, side_by_side, together
from harness.checks.costs import measured
from harness.checks.trial import (
    BUDGET,
    Broken,
    DoesNotApply,
    Step,
    Trial,
    decoded,
    difference,
    fresh_memory_full_of_nan,
    turn,
    watched,
)
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.saved_state import Snapshot
from harness.jobs.prefill import SharedPrefill
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.base import Budget, BudgetError, CostError, Method
from methods.full import Full

TURNS = (1.0, 0.42, 0.05)  # lengths of the turns of a conversation, as shares of the usual prompt
NEAR = 0.02  # by which share bytes may differ from the formula


@dataclass(frozen=True)
class Check:
    """Hold one check: `run` raises `Broken` where the contract does not hold, and `means` says what
    that means and where to look."""

    name: str
    run: Callable[[Trial], None]
    means: str


def runs(trial: Trial) -> None:
    """Check that a prompt and an answer run, and change nothing in place that others read."""
    assert trial.usual


def covered(trial: Trial) -> None:
    """Check that a budget that covers everything gives Full's logits, in further turns as well."""
    if not trial.method.uses_budget:
        raise DoesNotApply("it takes no budget")
    ids = trial.prompt()
    wanted, length = trial.full(ids), ids.shape[1]
    for budget in (1.0, 100 * length):
        steps = trial.run(ids, budget)
        if where := difference(steps, wanted):
            raise Broken(f"budget={budget} gives other tokens than Full {where}{_why(trial)}")
        for layer, (read, later) in enumerate(steps[-1].attended):
            if (read, later) != (length, trial.new):
                raise Broken(
                    f"with budget={budget} layer {layer} says that its step {trial.new} read {read:g} tokens of the "
                    f"prompt and {later:g} of the answer, and there are {length} and {trial.new}"
                )
    if where := difference(*(_talk(trial, kv) for kv in _beside_full(trial))):
        raise Broken(f"in further turns budget=1.0 gives other tokens than Full {where}")


def _why(trial: Trial) -> str:
    """Say in words whether and how stored rows differ from those of Full, to explain why an answer
    under budget 1.0 is not Full's."""
    stored = []
    for kv in _beside_full(trial):
        cache = watched(kv, trial.length + trial.new)
        turn(kv, cache, trial.prompt(), 1)
        stored.append(cache.whole_contents())
    own, exact = (contents[0] for contents in stored)  # what is wrong in layer 0 changes all others
    for name, what in (("k0", "keys"), ("v0", "values")):
        if name not in exact:  # keys hold them
            break
        mine, theirs = (state[name][:, :, : trial.length] for state in (own, exact))
        if mine.shape != theirs.shape:
            return ": layer 0 does not store all tokens of the prompt"
        if not torch.allclose(mine, theirs, atol=1e-4):
            return f": layer 0 stores other {what} than the model made, so the method changes rows that stay"
    return ": layer 0 stores what the model made, so a step reads or weighs it otherwise"


def _beside_full(trial: Trial) -> Iterator[Any]:
    """Yield the method and then Full, attached under a budget that covers everything."""
    for method in (trial.method, Full()):
        with Trial(method, trial.model, trial.length, trial.seed).attach(1.0) as kv:
            yield kv


def _talk(trial: Trial, kv: Any) -> list[Step]:
    """Return the steps of all turns of a conversation."""
    cache = watched(kv, 2 * trial.length + 3 * trial.new + 9)
    return [step for ids in _turns(trial) for step in turn(kv, cache, ids, trial.new)]


def _turns(trial: Trial) -> list[Tensor]:
    lengths = [max(1, int(share * trial.length)) for share in TURNS]
    return [trial.prompt(length, seed=number) for number, length in enumerate(lengths)]


def within_budget(trial: Trial) -> None:
    """Check that steps read no more of the prompt than the budget says, on average over the layers,
    and that a layer has read what it says it has read."""
    least = max(trial.method.smallest_budget, 24)
    for length, budget in (
        (trial.length, BUDGET),
        (trial.length + 17, (trial.length + 17) // 3),
        (least + 1, least),
    ):
        with trial.attach(budget) as kv:
            cache = watched(kv, length + trial.new + 3)
            steps = turn(kv, cache, trial.prompt(length), trial.new)
        _hold_to_budget(trial.method, cache, steps, f"{length} tokens under budget={budget}")


def _hold_to_budget(method: Method, cache: KVCache, steps: Sequence[Step], prompt: str) -> None:
    """Raise `Broken` if the steps of a turn have read more than the budget, or not what they say
    they have read. `prompt`: words for the turn's prompt."""
    length, counted = cache.sealed_tokens, ability(method, CountedAnswer)
    asked = _asked(cache, length)
    for count, step in enumerate(steps, 1):
        read = [prompt for prompt, _ in step.attended]
        if sum(read) > sum(asked):
            raise Broken(
                f"after {prompt}, step {count} reads {_listed(read)} tokens of it in the layers, and their budgets "
                f"are {_listed(asked)}"
            )
        for layer, (allowed, attended) in enumerate(zip(asked, step.attended, strict=True)):
            rows, most = sum(attended), allowed + (counted.extra_rows if counted else 0)
            if counted and rows > most:
                raise Broken(
                    f"after {prompt}, step {count} reads {rows:g} rows of prompt and answer in layer {layer}, and "
                    f"its budget counts both: {most}"
                )
            if not counted and attended[1] != count:
                raise Broken(
                    f"after {prompt}, step {count} says that it read {attended[1]:g} generated tokens in layer {layer}"
                )
            spec = cache.layers[layer].spec
            group = spec.num_heads // spec.num_kv_heads
            _check_positions(method, step.read[layer], attended[0], length, layer, group)
    for state, last, positions in zip(
        cache.layers, steps[-1].attended, steps[-1].read, strict=True
    ):
        excess = state.union_excess()
        said = last[0] + (0 if excess is None else excess.item())
        if positions is None:
            continue
        found = int((positions >= 0).sum()) / state.spec.num_kv_heads
        if found != said:
            raise Broken(
                f"after {prompt}, a KV head of layer {state.spec.index} read {found:g} tokens of it by "
                f"`read_positions`, and {said:g} by `attended` and `union_excess`"
            )


def _asked(cache: KVCache, length: int) -> list[int]:
    """Return how many tokens of a prompt of `length` tokens each layer may read."""
    return [
        layer.request.budget.tokens(length, index) if layer.request.budget else length
        for index, layer in enumerate(cache.layers)
    ]


def _check_positions(
    method: Method, positions: Tensor | None, read: float, length: int, layer: int, group: int
) -> None:
    """Raise `Broken` unless `positions` [1 G K] name as many tokens of a prompt of `length` tokens
    as `layer` says that it `read`, each once. `group`: query heads of a KV head, which may each read
    others."""
    if positions is None:
        if read != length:
            raise Broken(
                f"layer {layer} says that it read {read:g} of {length} prompt tokens, and `read_positions` that it "
                "read all"
            )
        return
    # -1 fills up a shorter union, and rows that were replaced by others have no position
    heads = [[p for p in head if p >= 0] for head in positions[0].tolist()]
    for head in heads:
        if len(set(head)) < len(head) or not all(p < length for p in head):
            raise Broken(f"layer {layer} read a token twice, or one that the prompt does not have")
    count = sum(map(len, heads)) / len(heads)
    by_query_head = getattr(method, "select_per", "kv_head") == "query_head"
    if not (read <= count <= group * read if by_query_head else read == count):
        raise Broken(
            f"layer {layer} says that it read {read:g} prompt tokens, and `read_positions` names {count:g}"
        )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def bytes_as_said(trial: Trial) -> None:
    """Check that as many bytes are held as the formula says, and no more moved and read."""
    length = max(400, trial.length)
    for asked in (max(length // 5, trial.method.smallest_budget), 1.0):
        budget = Budget(asked)
        for placement in trial.places():
            try:
                real, said, estimated = measured(trial, length, budget, placement)
            except CostError as error:
                raise DoesNotApply(
                    "it declares no `cost`, so no budget can stand for bytes, and memory that will not suffice is "
                    "not noticed before a run"
                ) from error
            where = f"budget={budget} placement={placement}, after {length} prompt tokens"
            for tier, held in real.held.items():
                formula = said.held[tier]
                if abs(held - formula) > NEAR * max(held, formula):
                    raise Broken(
                        f"{where}: {held} bytes are on the {tier}, and `cost` says {formula}"
                    )
            for what, found, formula in (
                ("moves", real.moved_bytes_per_step, said.moved_bytes_per_step),
                ("reads", real.read_bytes_per_step, said.read_bytes_per_step),
            ):
                if not estimated and found > (1 + NEAR) * formula:
                    raise Broken(f"{where}: a step {what} {found} bytes, and `cost` says {formula}")


def chunks(trial: Trial) -> None:
    """Check that a prompt in chunks gives what it gives as a whole."""
    _require_dense(trial.method)
    size = max(1, trial.length // 4 - 1)
    if where := difference(trial.run(trial.prompt(), chunk=size), trial.usual):
        raise Broken(f"a prompt in chunks of {size} tokens is answered otherwise {where}")


def _require_dense(method: Method) -> None:
    if not method.dense_prefill:
        raise DoesNotApply(
            "its prefill is sparse (`dense_prefill` is false), so what a chunk reads may depend on the chunk"
        )


def batches(trial: Trial) -> None:
    """Check that sequences of a batch get what each gets alone, in one cache and in a running batch."""
    ids = torch.cat([trial.prompt(trial.length - 12, seed=seed) for seed in range(2)])
    every = trial.run(ids)
    for number, row in enumerate(ids.split(1)):
        own = [step._replace(logits=step.logits[number : number + 1]) for step in every]
        if where := difference(own, trial.run(row)):
            raise Broken(
                f"sequence {number} of a batch of 2 is answered otherwise than alone {where}"
            )
    prompts = [trial.prompt(trial.length - 7 * number, seed=number) for number in range(2)]
    with trial.attach() as kv:
        engine = Engine(kv)
        alone = [engine.generate(ids, max_new_tokens=trial.new).tokens for ids in prompts]
        beside = [made.tokens for made in side_by_side(engine, prompts, trial.new)]
        if alone != beside:
            shared = "" if engine.one_by_one else ", in steps that its class lines (of_each) allow"
            raise Broken(f"sequences that step together are answered otherwise than alone{shared}")


def placements(trial: Trial) -> None:
    """Check that rows on the host and on disk give what they give on the device."""
    if not trial.method.offloads:
        raise DoesNotApply("it keeps everything on the device (`offloads` is false)")
    for placement in ("host", "disk"):
        if where := difference(trial.run(trial.prompt(), placement=placement), trial.usual):
            raise Broken(f"placement={placement} answers otherwise than placement=device {where}")


def further_turns(trial: Trial) -> None:
    """Check that further turns keep to the budget, wherever rows lie, unless the method says that
    it does something else there."""
    for placement in trial.places():
        with trial.attach(placement=placement) as kv:
            cache = watched(kv, 2 * trial.length + 3 * trial.new + 9)
            for number, ids in enumerate(_turns(trial), 1):
                steps = turn(kv, cache, ids, trial.new)
                try:
                    _hold_to_budget(trial.method, cache, steps, f"the prompt of turn {number}")
                except Broken as broken:
                    if number == 1 or cache.fallback is None:
                        raise
                    raise DoesNotApply(f"it says that {cache.fallback}") from broken


def saved(trial: Trial) -> None:
    """Check that a turn goes on in another cache, from what `state` returned, as in its own."""
    answers = list[list[Step]]()
    with trial.attach() as kv:
        for moves in (False, True):
            capacity = 2 * trial.length + 3 * trial.new + 9
            cache, made = watched(kv, capacity), list[Step]()
            for ids in _turns(trial):
                made += turn(kv, cache, ids, trial.new)
                if moves:
                    stored = [
                        {name: x.clone() for name, x in state.items()} for state in cache.contents()
                    ]
                    cache = watched(kv, capacity + 30)
                    cache.refill(stored)
            answers.append(made)
    stays, moved = answers
    if where := difference(moved, stays):
        raise Broken(f"a conversation that goes on in another cache is answered otherwise {where}")
    for count, (own, other) in enumerate(zip(moved, stays, strict=True), 1):
        if own.attended != other.attended or not _same_positions(own.read, other.read):
            raise Broken(f"step {count} of a conversation reads other tokens in another cache")


def _same_positions(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None)
        and (a is None or b is None or torch.equal(a.sort(-1).values, b.sort(-1).values))
        for a, b in zip(one, other, strict=True)
    )


@torch.inference_mode()
def shared_prefill(trial: Trial) -> None:
    """Check that a prompt that Full has computed gives what a prefill of the method's own gives."""
    _require_dense(trial.method)
    ids = trial.prompt()
    for chunk in (None, max(1, trial.length // 4 - 1)):
        with trial.attach() as kv:
            engine, answers = Engine(kv, prefill_chunk=chunk), list[list[Step]]()
            shared = SharedPrefill(engine, ids, trial.new + 3)
            cache = shared.cache(engine, lambda layer, x: layer.absorb(x))
            own = engine.cache(ids, trial.new + 3)
            for filled, logits in (
                (cache, shared.run(ids.shape[1])),
                (own, engine.prefill(own, ids)),
            ):
                filled.seal()
                answers.append(decoded(kv, filled, logits, trial.new))
        if where := difference(*answers):
            raise Broken(f"a shared prefill is answered otherwise than one of its own {where}")


@torch.inference_mode()
def likelihoods(trial: Trial) -> None:
    """Check that an answer is the same whether or not another was fed before it, as a likelihood."""
    ids = trial.prompt()
    for placement in trial.places():
        with trial.attach(placement=placement) as kv:
            engine, answers = Engine(kv), list[list[Step]]()
            for measures in (True, False):
                cache = engine.cache(ids, trial.new + 3)
                logits = engine.prefill(cache, ids, whole=True)
                cache.seal()
                if measures:
                    snapshot = Snapshot(cache)
                    for token in trial.prompt(trial.new, seed=3)[0]:
                        engine.decode(token.view(1, 1), cache, None)
                    snapshot.restore()
                answers.append(decoded(kv, cache, logits, trial.new))
        if where := difference(*answers):
            raise Broken(
                f"after another answer was fed and taken back (likelihood=on), the answer differs {where}"
            )


def questions(trial: Trial) -> None:
    """Check that questions that share a sealed context get the answers that each gets alone."""
    asked = [trial.prompt(2 + number, seed=number) for number in range(1, 4)]
    context = trial.prompt(trial.length - 22)
    for placement in trial.places():
        with trial.attach(placement=placement) as kv:
            engine = Engine(kv)
            shared = together(engine, context, asked, trial.new)
            alone = apart(engine, context, asked, trial.new)
            for number, (own, one) in enumerate(zip(shared, alone, strict=True), 1):
                mine, wanted = seen(own), seen(one)
                differs = [key for key, value in mine.items() if value != wanted[key]]
                if differs:
                    raise Broken(
                        f"question {number} on a shared context (questions=shared, placement={placement}) differs in "
                        f"{', '.join(differs)} from the same question alone"
                    )


def small(trial: Trial) -> None:
    """Check that no length is refused, a prompt too short for sinks and windows is read whole, and
    too small a budget is refused by name."""
    method, share, least = trial.method, 0.2, trial.method.smallest_budget
    longest = trial.prompt(max(71, 5 * least))
    for length in sorted({1, 6, least, least + 1, 5 * least - 1, 5 * least, 71}):
        ids = longest[:, :length]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was read whole
            with trial.attach(share) as kv:
                cache = watched(kv, length + 8)
                steps = turn(kv, cache, ids, 2)
        if not method.uses_budget:
            continue
        asked = _asked(cache, length)
        if method.reads_all(length, asked[-1]):
            if where := difference(steps, trial.full(ids)[:2]):
                raise Broken(
                    f"a prompt of {length} tokens is read whole under budget={share}, and answered otherwise than by "
                    f"Full {where}"
                )
            if asked[-1] < length and not cache.fallback:
                raise Broken(
                    f"a prompt of {length} tokens is read whole, and `fallback` is not set"
                )
        elif sum(read for read, _ in steps[-1].attended) > sum(asked) and not cache.fallback:
            raise Broken(f"more of a prompt of {length} tokens is read than budget={share} gives")
    if not method.uses_budget or least == 1:
        return
    trial.run(longest, least)
    try:
        trial.run(longest, least - 1)
    except BudgetError as error:
        if f"at least {least}" in str(error):
            return
    raise Broken(
        f"budget={least - 1} is below `smallest_budget`, and is not refused with the least number, {least}"
    )


def fresh_memory(trial: Trial) -> None:
    """Check that memory that was never written is never read."""
    ids = trial.prompt(batch=2)
    for placement in trial.places():
        wanted = trial.run(ids, 0.5, placement=placement)
        with fresh_memory_full_of_nan():
            steps = trial.run(ids, 0.5, placement=placement)
        if where := difference(steps, wanted):
            raise Broken(f"with new memory full of NaN the answer differs {where}")


def half_precision(trial: Trial) -> None:
    """Check that a model in bf16 gives finite logits in bf16."""
    model = deepcopy(trial.model).to(torch.bfloat16)
    with trial.attach(model=model) as kv:
        cache = watched(kv, trial.length + trial.new + 3)
        steps = turn(kv, cache, trial.prompt(), trial.new)
    for count, step in enumerate(steps, 2):
        if step.logits.dtype != torch.bfloat16 or not bool(step.logits.isfinite().all()):
            raise Broken(
                f"in bf16 the logits of token {count} are {step.logits.dtype} or not finite"
            )


CHECKS = (
    Check("runs", runs, ""),
    Check(
        "budget 1.0 is Full",
        covered,
        "where the budget covers the prompt no rule of the method may act, whatever it keeps, reads or weighs",
    ),
    Check(
        "budget kept",
        within_budget,
        "`keep` and `select` return as many rows as they are asked for, `split` adds up to the budget, and a layer "
        "reads more only if another reads less",
    ),
    Check(
        "bytes as said",
        bytes_as_said,
        "`cost` counts all that a layer holds, indices and statistics too; methods/parts/costs.py has the usual sums",
    ),
    Check(
        "chunks as whole",
        chunks,
        "`observe` and `prefill` see one chunk at a time, so gather there over all of them, and choose at the seal",
    ),
    Check(
        "batch as alone",
        batches,
        "a tensor mixes sequences (each has B in front), or `of_each` leaves out what steps use: without it sequences "
        "take their steps one by one",
    ),
    Check(
        "host as device",
        placements,
        "a step reads the middle of the prompt by `fetch` alone; an index is made of the keys that `index` is given",
    ),
    Check(
        "further turn",
        further_turns,
        "after a seal prompt comes again: row numbers are no positions then, and what the last seal left is taken "
        "back in `reopen`",
    ),
    Check(
        "saved and restored",
        saved,
        "what a further turn needs and cannot compute from keys and values goes through `state` and `restore`",
    ),
    Check(
        "shared prefill",
        shared_prefill,
        "`observe` must gather all that `prefill` does; a method whose prompt is not Full's says dense_prefill = False",
    ),
    Check(
        "likelihood on as off",
        likelihoods,
        "going back to the seal does not undo what a step did: what steps change are attributes of the policy, and "
        "stored rows change by layer.write alone",
    ),
    Check(
        "questions shared as separate",
        questions,
        "as above: the second question finds what steps of the first have left",
    ),
    Check(
        "small prompts and budgets",
        small,
        "`smallest_budget` is the tokens that the method must hold whatever the budget: sinks, windows, and one to "
        "choose",
    ),
    Check(
        "fresh memory",
        fresh_memory,
        "rows of torch.empty, or of a store beyond its length, are read before they are written",
    ),
    Check(
        "bf16",
        half_precision,
        "compute scores and sums in fp32 (`.float()`), and return to the model's dtype",
    ),
)
