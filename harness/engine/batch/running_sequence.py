"""Holds one sequence of a running batch: its cache, its tokens, its clock and its counters, and what it
gave in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.engine.batch.along import Mark, along, ends_stretch
from harness.engine.cache import KVCache
from harness.engine.facts import GENERATED
from harness.engine.footprint import footprint, unused_bytes
from harness.engine.sampling import Greedy, Sampler
from harness.models.devices import read_later, wait_for
from harness.prompts.teacher import Forced
from kernels import ops
from kernels.toolchain import compiled_s
from methods.layers.weights import counts_choices
from methods.tiers.tier import DISK, bytes_key

Stop = Callable[[list[int]], str | None]  # tokens so far -> why to stop, or None
UNION_EVERY = 8  # steps; counting a union takes a few percent of a step
LENGTH, FORCED, LEFT = "length", "forced", "left"
UNCLOCKED = "a GPU brings rows of host memory by itself, and no clock of the host sees when"


def never(tokens: list[int]) -> str | None:
    """Never stop an answer before its length limit: a stop rule that returns None for any
    `tokens`."""
    return None


@dataclass(frozen=True, slots=True)
class After:
    """Stop an answer whose `count` tokens are given (teacher forcing) after the last of them."""

    count: int

    def __call__(self, tokens: list[int]) -> str | None:
        return FORCED if len(tokens) == self.count else None


def safe_tokens(stop: Stop) -> float:
    """Return how many tokens an answer can have without the rule `stop` ending it: the next token
    may end it. Return 0 if nothing is known of the rule."""
    if stop is never:
        return inf
    return stop.count - 1 if isinstance(stop, After) else getattr(stop, "min_new_tokens", 0)


@dataclass(slots=True)
class Generation:
    """Hold the answer of one sequence, or of B sequences of equal length that share a cache, and
    its measurements.

    Seconds count from the start of the prefill. The clock stands still while other sequences of the
    batch join or leave (harness/engine/batch/running_sequence.py)."""

    tokens: list[list[int]]  # per sequence, including the token that stopped it
    stops: list[str]  # per sequence, why it ended
    # when step i's tokens were on the host (`RunningBatch`)
    token_s: list[float] = field(default_factory=list)
    seal_s: float | None = None
    question_s: float | None = None
    # machine seconds: its prefill and seal, and an equal part of each step it was in
    share_s: float = 0.0
    decode_share_s: float = 0.0  # machine seconds after the second token
    sealed: bool = False
    fallback: str | None = None
    # means over steps (harness/results/measures.py)
    measured: dict[str, float | None] = field(default_factory=dict)
    kv: dict[str, int] = field(default_factory=dict)  # bytes held per tier
    state_bytes: int = 0  # of the model's states, beside keys and values
    # costs along the answer (harness/engine/batch/along.py), if it is long
    along: dict[str, list[float]] | None = None
    fidelity: list[dict[str, Any] | None] | None = None  # per sequence
    # per sequence, where the tokens were given (harness/prompts/teacher.py)
    nll: list[float] | None = None
    # per sequence, whether the model would have chosen every given token
    likeliest: list[bool] | None = None
    trace: dict[str, Any] | None = None  # medians over its clocked steps (harness/engine/trace.py)
    not_finite: int | None = None  # index of the first token whose logits held NaN or infinity
    unclocked: str | None = None  # why the time its steps waited for moving rows is unknown
    # how often its text was computed again because it outgrew the model's rotation
    recomputed: int = 0
    # time to capture its first decode step, part of the second token's time
    capture_s: float | None = None
    # in which Triton made kernels ready from its prefill on, part of the other times
    compile_s: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The values that a record holds of it, by key (harness/engine/facts.py and harness/results/measures.py)."""
        held = {bytes_key(tier): size for tier, size in self.kv.items()}
        return {**{key: getattr(self, key) for key in GENERATED}, **held, **self.measured}


def seal(cache: KVCache) -> float:
    """Seal a cache, which ends its prompt: the method now chooses, indexes or moves what the prompt
    has left. Return the seconds that this took, including those of layers that were sealed ahead.
    """
    device = cache.state.request.device
    wait_for(device)  # under protocol=context the prefill may be under way
    before = perf_counter()
    cache.seal()
    wait_for(device)
    return cache.closed_s + perf_counter() - before


class SlotClock:
    """Count the seconds of one sequence since `began`, without those in which its clock was
    paused."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._paused = began

    def now(self) -> float:
        return perf_counter() - self._began

    def pause(self) -> None:
        self._paused = perf_counter()

    def resume(self) -> None:
        self.skip(perf_counter() - self._paused)

    def skip(self, seconds: float) -> None:
        self._began += seconds


class RunningSequence:
    """Hold one sequence, or B sequences of equal length that share `cache`, while it decodes. Its
    `clock` runs during the prefill, the seal and its steps."""

    def __init__(
        self,
        cache: KVCache,
        question: Tensor,
        began: float,
        *,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`question` [B Q]: tokens that are decoded before the first token of the answer
        (protocol=context). `max_new_tokens`: the most tokens of the answer. `stops`: a rule for
        each sequence; None: none ends it earlier. `sampler`: None takes the most likely token."""
        self.cache = cache
        self.stops = list(stops or [never] * len(question))
        self.sampler = sampler or Greedy()
        self.max_new_tokens = max_new_tokens
        self.clock, self._began = SlotClock(began), began
        self.out = Generation(tokens=[[] for _ in self.stops], stops=[""] * self.rows)
        # seconds of each part, per clocked step (harness/engine/trace.py)
        self.parts: list[dict[str, float]] = []
        self.read: list[float] = []  # bytes that each traced step read, where all layers know them
        self._device = cache.state.request.device
        # [B 1] each
        self._question = deque(question.split(1, dim=1)) if question.shape[1] else deque[Tensor]()
        self._last: Sequence[int] = ()  # the token of each sequence that was picked last
        self._asked: float | None = None  # the clock's time when the question began
        self._steps = 0
        # [layers B], of layers that read as many prompt tokens as they need
        self._varying: float | Tensor = 0.0
        # prompt tokens read in all steps, summed over layers whose count is in Python
        self._prompt_reads = 0.0
        self._device_reads: list[Tensor] = []  # [layers B] each, counts that are on the device
        # generated tokens read, mean over layers, summed over steps
        self._other_reads: float | Tensor = 0.0
        # tokens that the union over heads adds, every UNION_EVERY steps
        self._excess: list[Tensor | float] = []
        self._unites = True  # heads of a group may read different tokens
        self.behind = 0  # steps of a cache that steps alone, not noted yet
        self._finite: list[bool] = []  # per token, whether its logits are
        self._marks: list[Mark] = []  # the ends of the answer's stretches
        self._before = cache.traffic.copy()  # traffic before the first step
        self._recomputed = cache.recomputed

    @property
    def ended(self) -> bool:
        return all(self.out.stops)

    @property
    def crosses_bus(self) -> bool:
        """Return whether keys and values in host memory have to cross a bus to the device, which
        takes time. On a CPU they are there already."""
        return self._device.type != "cpu"

    @property
    def rows(self) -> int:
        return len(self.stops)

    def counts_union(self, steps: int) -> bool:
        """Return True if the last step is one of those (every UNION_EVERY-th) after which the
        distinct tokens are counted that the query heads of a KV head read together. `steps`: how
        many steps, that one included, were not noted yet (`note_reads`)."""
        return self._unites and (self._steps + steps - 1) % UNION_EVERY == 0

    def is_due(self, steps: int) -> bool:
        """Return True if the last `steps` steps must be noted now (`note_reads`) and cannot wait for others."""
        return self.counts_union(steps) or ends_stretch(self._steps + steps, len(self._marks))

    @property
    def adds_up(self) -> bool:
        """Return whether layers add up by themselves what their steps read (`counts_choices`)."""
        return isinstance(self._varying, Tensor)

    def begin(self, logits: Tensor | None) -> None:
        """Start the answer after the prefill. Without a question, pick the first token and seal the
        cache (end its prompt); with a question (protocol=context), only seal, since the question is
        fed next. A sealed cache stays as it is.

        `logits` [B V]: those of the prompt's last token. If the answer ends with its first token,
        no seal is needed and none is done, unless all layers were sealed during the prefill
        (`KVCache.close`)."""
        if not self._question:
            assert logits is not None
            self.take(logits)
        if not self.cache.sealed and (self.cache.has_closed or not self.ended):
            self.out.seal_s = seal(self.cache)
            self._before = self.cache.traffic.copy()
        if self._question:
            self._asked = self.clock.now()
        self.out.share_s = self.clock.now()
        self.clock.pause()

    def next(self) -> Tensor:
        """Return the tokens [B 1] to feed in the next decode step: of the question, if some are
        left, else of the answer."""
        return self._question.popleft() if self._question else torch.tensor(self._last).unsqueeze(1)

    @property
    def asking(self) -> bool:
        """Return whether tokens of the question are still to be fed, so that none is picked."""
        return bool(self._question)

    @property
    def takes_likeliest(self) -> bool:
        """Return whether the answer takes the most likely token of each step, and its question was
        over before this one."""
        return type(self.sampler) is Greedy and not self._question and self._asked is None

    @property
    def goes_on(self) -> bool:
        """Return whether this answer certainly goes on after its next token, whatever that is."""
        least = min(self.max_new_tokens - 1, *map(safe_tokens, self.stops))
        return all(
            stop or len(tokens) < least
            for stop, tokens in zip(self.out.stops, self.out.tokens, strict=True)
        )

    def take(self, logits: Tensor) -> None:
        """Pick the next token of the answer from the `logits` [B V] of the tokens that were fed
        last, unless tokens of the question are still to be fed."""
        if (picked := self.pick(logits)) is not None:
            self.note(*read_later(picked)())

    def pick(self, logits: Tensor, likeliest: Tensor | None = None) -> Tensor | None:
        """Pick the next token of every sequence from `logits` [B V], without waiting for the
        device. Return a tensor [2 B] of them and, below each, 1 if its logits are finite, else 0;
        None while tokens of the question are to be fed. `likeliest`: what
        `kernels.ops.likeliest_tokens` gives for the logits, if it is known."""
        if self._question:
            return None
        if self._asked is not None:
            wait_for(self._device)
            self.out.question_s, self._asked = self.clock.now() - self._asked, None
        if type(self.sampler) is Greedy:
            return ops.likeliest_tokens(logits) if likeliest is None else likeliest
        finite = (
            logits.sum(-1, dtype=torch.float32).isfinite() if likeliest is None else likeliest[1]
        )
        return torch.stack([self.sampler.pick(logits), finite])

    def note(self, ids: Sequence[int], finite: Sequence[int]) -> None:
        """Take the next token of every sequence, `ids`, which has just arrived on the host, with
        its time. `finite`: 0 where its logits hold NaN or infinity."""
        self.out.token_s.append(self.clock.now())
        self._last = ids
        self._finite.append(all(finite))
        for i, token in enumerate(ids):
            if not self.out.stops[i]:
                self.out.tokens[i].append(token)
                full = len(self.out.tokens[i]) >= self.max_new_tokens
                self.out.stops[i] = self.stops[i](self.out.tokens[i]) or (LENGTH if full else "")

    def bill(self, step_s: float, capture_s: float | None, together: int) -> None:
        """Add the seconds of the last step to the sequence's machine time: an equal share for each
        of the `together` sequences that took it. `capture_s`: seconds of a capture besides
        `step_s`, if there was one; `decode_share_s` leaves them out."""
        self.out.share_s += (step_s + (capture_s or 0.0)) / together
        if len(self.out.token_s) > 2:
            self.out.decode_share_s += step_s / together

    def captured(self, seconds: float, counts: bool) -> None:
        """Take note of a capture that took so many `seconds`. `counts`: they count in its time even
        if it is not the first one, since no other sequences came or went."""
        if self.out.capture_s is None:
            self.out.capture_s = seconds
        elif not counts:
            self.clock.skip(seconds)

    def finish(self) -> None:
        """Fill in all measurements of the answer in `out`. The last token has its time already, so
        the seconds that this takes are in no clock."""
        out, steps = self.out, self._steps
        traffic, before = self.cache.traffic, self._before
        out.stops = [stop or LEFT for stop in out.stops]
        out.sealed = self.cache.sealed
        out.not_finite = self._finite.index(False) if False in self._finite else None
        out.recomputed += self.cache.recomputed - self._recomputed
        out.fallback, out.compile_s = self.cache.fallback, compiled_s(self._began)
        out.kv = footprint(self.cache.layers)
        out.state_bytes = 0 if self.cache.states is None else self.cache.states.nbytes
        if isinstance(self.sampler, Forced):
            out.nll, out.likeliest = self.sampler.mean_nll(), self.sampler.likeliest.tolist()
        if steps:
            layers = len(self.cache.method_layers)
            reads = self._prompt_reads
            unread = torch.cat(self._device_reads).double().mean(1) if self._device_reads else None
            if unread is not None:
                reads += unread.sum().item()
            attended = reads / (steps * layers)
            # of the union over heads
            excess = sum(map(float, self._excess)) / (len(self._excess) * layers)
            out.measured |= {
                "attended_prompt": attended,
                "union_prompt": attended + excess,
                "attended_total": attended + float(self._other_reads) / steps,
                **self._quantiles(steps),
                "moved_bytes_per_step": (traffic.total_bytes - before.total_bytes) / steps,
                "from_disk_bytes_per_step": (traffic.from_disk_bytes - before.from_disk_bytes)
                / steps,
            }
            if self.crosses_bus and self.cache.state.request.placement == DISK:
                out.measured |= {
                    "exposed_s_per_step": (traffic.exposed_s - before.exposed_s) / steps,
                    "hidden_s_per_step": (traffic.hidden_s - before.hidden_s) / steps,
                }
            elif self.crosses_bus and out.measured["moved_bytes_per_step"]:
                out.unclocked = UNCLOCKED
            if self._marks:
                last = [self._mark()] if self._marks[-1].steps < steps else []
                begin = Mark(moved_bytes=before.total_bytes)
                out.along = along(
                    [begin, *self._marks, *last], unread, layers, sum(out.kv.values())
                )
        if looked_up := traffic.looked_up - before.looked_up:
            out.measured["hit_rate"] = (traffic.found - before.found) / looked_up
        if samples := traffic.samples - before.samples:
            out.measured["capped_share"] = (traffic.capped - before.capped) / samples

    def _quantiles(self, steps: int) -> dict[str, float]:
        """Return quantiles over layers and sequences of how many prompt tokens a head read per step,
        where a method reads as many as it needs."""
        if not isinstance(self._varying, Tensor):
            return {}
        shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=self._varying.device)
        values = (self._varying.double() / steps).flatten().quantile(shares).tolist()
        return dict(zip(("attended_p10", "attended_p50", "attended_p90"), values, strict=True))

    def note_reads(self, steps: int) -> None:
        """Count how many tokens the layers read in the last `steps` steps, of which the cache
        knows. Nothing waits for the device."""
        if not steps:
            return
        layers = self.cache.method_layers
        if self.counts_union(steps):
            added = [
                excess.to(self._device).mean()
                for layer in layers
                if (excess := layer.union_excess()) is not None
            ]
            self._excess.append(sum(added))
            self._unites = bool(added)
        self._steps += steps
        prompt, generated = zip(*(layer.readings(steps) for layer in layers), strict=True)
        self._prompt_reads += sum(count for count in prompt if not isinstance(count, Tensor))
        if unread := [count for count in prompt if isinstance(count, Tensor)]:
            # a copy
            self._device_reads.append(torch.stack([count.to(self._device) for count in unread]))
        needed = [
            count.to(self._device)
            for layer, count in zip(layers, prompt, strict=True)
            if isinstance(count, Tensor) and counts_choices(layer)
        ]
        if needed:
            self._varying = self._varying + torch.stack(needed)
        others = [
            count.to(self._device).mean() if isinstance(count, Tensor) else count
            for count in generated
        ]
        self._other_reads += sum(others) / len(others)
        if ends_stretch(self._steps, len(self._marks)):
            self._marks.append(self._mark())

    def _mark(self) -> Mark:
        """Return what has been counted so far."""
        traffic, waiting = self.cache.state.traffic, sum(map(len, self._device_reads))
        on_device, generated = traffic.tallies.get("to_device_bytes"), self._other_reads
        return Mark(
            self._steps,
            self._prompt_reads,
            waiting,
            # which later steps add to
            generated.clone() if isinstance(generated, Tensor) else generated,
            traffic.total_bytes,
            None if on_device is None else on_device.clone(),
            unused_bytes(self.cache.layers),
        )
