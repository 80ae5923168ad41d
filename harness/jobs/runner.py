"""Answers examples with one attached model: prompts in, records out, `settings.batch` examples at a
time. It runs what it is given; which examples are still missing, and how an interrupted run
resumes, is decided in evaluate.py."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from evals.base import Task
from harness.config.errors import is_memory
from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import After, Generation, RunningSequence, Stop, never
from harness.engine.engine import Engine
from harness.engine.graph import CudaGraphs
from harness.engine.sampling import Greedy, MinLength, Sampled, Sampler
from harness.engine.trace import Tracer
from harness.jobs.examples import PreparedExample, by_context, room, sampling_seed
from harness.jobs.histories import Histories, in_memory, opened
from harness.jobs.likelihood import Likelihood, choices_output
from harness.jobs.prefill import Prefilled, Usage
from harness.jobs.questions import ContextSession, Failed, Transcript, let_go, refuse_to_go_on
from harness.jobs.replies import Rule, record_of, scored, stop_rule
from harness.models.base import LoadedModel
from harness.models.devices import wait_for
from harness.prompts.teacher import Forced
from harness.prompts.thinking import ThoughtfulAnswer
from harness.results.records import Record

WARMUP_TOKENS = 4


@dataclass
class SideBySide:
    """Holds the sequences that run at the moment and those that wait. An entry of a queue is a list
    of examples that share a context, or of one example."""

    batch: RunningBatch
    most: int  # that run at the same time
    waiting: deque[list[PreparedExample]]
    suspects: deque[list[PreparedExample]] = field(
        default_factory=deque
    )  # of a step of several that failed: one by one
    running: dict[RunningSequence, ContextSession] = field(default_factory=dict)
    alone: bool = False  # whether what runs is one of the suspects
    short_of_memory: bool = False  # whether memory ran out since the last example began

    def abandon(self, slots: Sequence[RunningSequence]) -> None:
        self.batch.abandon(slots)
        for slot in slots:
            self.running.pop(slot, None)

    def give_up(self, asking: ContextSession, error: Exception) -> Iterator[Failed]:
        """Yield the current example of `asking` as failed, or none if it is to be tried again alone.
        The examples that still wait on the same context go back into the queue, and their context
        will be prefilled again."""
        asking.give_up()
        if self.tries_alone([asking.asked, *asking.waiting], error):
            return
        yield Failed(asking.asked, error)
        if asking.waiting:
            (self.suspects if self.alone else self.waiting).appendleft(asking.waiting)

    def tries_alone(self, items: Sequence[PreparedExample], error: Exception) -> bool:
        """Return True if memory ran out where others may have taken it. `items`, the examples of one
        context, will then be run again by themselves."""
        self.short_of_memory |= is_memory(error)
        if self.alone or self.most == 1 or not is_memory(error):
            return False
        let_go(error)
        self.suspects.append(list(items))
        return True

    def free_memory(self, prefilled: dict[str, Prefilled]) -> None:
        """Give back, after memory has run out, what no example uses now, including the caches
        `prefilled` of examples that wait; these will be prefilled again."""
        if self.short_of_memory:
            self.short_of_memory = False
            prefilled.clear()
            gc.collect()
            torch.cuda.empty_cache()


class Runner:
    """Turns prepared examples into records with one method attached to one loaded model. Call
    `close` after the last."""

    def __init__(
        self,
        task: Task,
        settings: Settings,
        folder: Path,
        attachment: Attachment,
        loaded: LoadedModel,
    ) -> None:
        self.task, self.settings, self.loaded, self.folder = task, settings, loaded, folder
        self._closing = ExitStack()
        self.device = loaded.model.device
        self.engine = Engine(
            attachment,
            prefill_chunk=settings.prefill_chunk,
            fidelity=settings.fidelity,
            graphs=CudaGraphs(self.device) if settings.graphs == "on" else None,
        )
        self._closing.callback(attachment.close)
        self.likelihood = (
            Likelihood(self.engine, loaded.tokenizer) if settings.measures_likelihood else None
        )
        self._backends: dict[str, set[str]] = {}
        if settings.trace == "on":
            self.engine.tracer = Tracer(self.device)

    @cached_property
    def kept(self) -> Histories:
        """The caches of conversations between their turns. There is one store for the whole run,
        opened on first use."""
        histories = opened(self.settings, self.engine.attachment, self.loaded, self.folder.name)
        return self._closing.enter_context(histories)

    def close(self) -> None:
        self._closing.close()

    def warm_up(self, pending: Sequence[PreparedExample]) -> None:
        """Run the `warmup` shortest examples, untimed and unrecorded, before the others: the first
        forwards pay for allocations, lazy imports and a check of what the method returns.
        Conversations come first, so that a further turn is warmed up, too. The store is not
        used."""
        tracer, self.engine.tracer = self.engine.tracer, None
        by_length = sorted(pending, key=lambda item: (not item.further, len(item.prompt.ids)))
        kept = in_memory(self.settings, self.engine.attachment)
        for _ in self.answers(
            [_shortened(item) for item in by_length[: self.settings.warmup]], kept=kept
        ):
            pass
        self.engine.tracer = tracer

    def answers(
        self,
        items: Iterable[PreparedExample],
        prefilled: dict[str, Prefilled] | None = None,
        kept: Histories | None = None,
    ) -> Iterator[Transcript | Failed]:
        """Yield the answers to `items` in the order in which they end. `batch` examples run at a
        time; when one ends, the next joins. If a step of several examples fails, each of them is
        run again by itself, so that only the one at fault fails.

        `prefilled`: prompts that have been prefilled already, by the id of the first example on a
        context; entries are removed when they are used, so that no cache outlives its answers.
        `kept`: where conversations keep their caches between turns, in place of the run's own
        store.
        """
        items = list(items)
        kept = kept or self.kept  # opened before a clock runs
        return _whole_examples(items, self._transcripts(items, prefilled or {}, kept))

    def _transcripts(
        self, items: Sequence[PreparedExample], prefilled: dict[str, Prefilled], kept: Histories
    ) -> Iterator[Transcript | Failed]:
        """Yield what each example gave, in the order in which they end. An example with choices
        gives one transcript per choice, because each choice runs as an example of its own
        (`PreparedExample.parts`)."""
        stage, shared = self.engine.attachment.stage, self.settings.questions == "shared"
        groups = by_context(items, stage, shared=shared)
        side = SideBySide(
            RunningBatch(self.engine),
            self.settings.batch,
            deque([part for item in group for part in item.parts] for group in groups),
        )
        while side.waiting or side.suspects or side.running:
            if not side.running:
                side.alone = bool(side.suspects)
            queue, most = (side.suspects, 1) if side.alone else (side.waiting, side.most)
            side.free_memory(prefilled)
            while queue and len(side.running) < most and not side.short_of_memory:
                yield from self._begun(queue.popleft(), prefilled, kept, side)
            yield from self._answered(side)

    def _begun(
        self,
        items: Sequence[PreparedExample],
        prefilled: dict[str, Prefilled],
        kept: Histories,
        side: SideBySide,
    ) -> Iterator[Failed]:
        """Start the examples of one context: use the cache in `prefilled`, or prefill one. Yield an
        example only if it fails."""
        try:
            ready = prefilled.pop(items[0].example.id, None) or self._prefill(items)
            context = self._context(items[0])
            likelihood, ending = self.likelihood, self.ending
            asking = ContextSession(self.engine, kept, items, ready, context, ending, likelihood)
        except Exception as error:
            if not side.tries_alone(items, error):
                yield from (Failed(item, error) for item in items)
        else:
            yield from self._go_on(asking, side)

    def _answered(self, side: SideBySide) -> Iterator[Transcript | Failed]:
        """Step all running sequences until some turns end, start what follows these turns, and
        yield the examples that are finished. This is a function of its own so that no local
        variable keeps the cache of a finished example alive."""
        try:
            ended = self._ended(side)
        except Exception as error:
            running = list(side.running.values())
            side.abandon(list(side.running))
            if len(running) == 1:
                yield from side.give_up(running[0], error)
            else:
                refuse_to_go_on(error)
                let_go(error)
                side.short_of_memory |= is_memory(error)
                for asking in running:
                    asking.give_up()
                    side.suspects.append([asking.asked, *asking.waiting])
            return
        for asking, generation in ended:
            try:
                asking.ended(generation)
            except Exception as error:
                yield from side.give_up(asking, error)
                continue
            if asking.answered:
                yield asking.transcript
            yield from self._go_on(asking, side)

    def _prefill(self, items: Sequence[PreparedExample]) -> Prefilled:
        ids, context = self.prompt(items[0])
        with Usage(self.device) as usage:
            cache = self.engine.cache(ids, room(items) - ids.shape[1])
            wait_for(self.device)
            began = perf_counter()
            logits = self.engine.prefill(cache, ids[:, :context], whole=True)
        return Prefilled(cache, logits, began, usage)

    def _go_on(self, asking: ContextSession, side: SideBySide) -> Iterator[Failed]:
        """Start the next turn or example on the cache of `asking`, if there is one. Yield an
        example only if it fails."""
        try:
            slot = asking.next(side.batch)
        except Exception as error:
            side.abandon([slot for slot in side.batch.sequences if slot not in side.running])
            yield from side.give_up(asking, error)
        else:
            if slot is not None:
                side.running[slot] = asking

    def _ended(self, side: SideBySide) -> list[tuple[ContextSession, Generation]]:
        """Step until some turns have ended, and return these with their answers; they no longer
        run."""
        if not side.running:
            return []
        self._measure(side)
        with Usage(self.device) as usage:
            ended = side.batch.run()
        for asking in side.running.values():
            asking.transcript.decode.add(usage)
        over = [(side.running.pop(slot), slot.out) for slot in ended]
        for asking, _ in over:
            self.used(asking.transcript.prefill.backends)
            self.used(asking.transcript.decode.backends)
        return over

    def _measure(self, side: SideBySide) -> None:
        """Measure the likelihood of right answers to all turns that begin, together."""
        begun = {one: asking for asking in side.running.values() if (one := asking.unmeasured)}
        if self.likelihood is not None and begun:
            for asking, costs in zip(
                begun.values(), self.likelihood.measure([*begun]), strict=True
            ):
                asking.measured(costs)
            wait_for(self.device)

    def used(self, backends: Mapping[str, Sequence[str]]) -> None:
        """Add backends of operations to those that this job has used."""
        for name, used in backends.items():
            self._backends.setdefault(name, set()).update(used)

    @property
    def notes(self) -> dict[str, Any]:
        """The entries of run.json that say how the engine has run so far: why our own forward or
        captured steps were not used, and which backends ran."""
        uncaptured = (
            "graphs=off" if self.device.type == "cuda" and self.settings.graphs == "off" else None
        )
        return {
            "own_forward": self.engine.plain_reason,
            "plain_steps": self.engine.plain_steps or uncaptured,
            "one_by_one": self.engine.one_by_one,
            "unclocked": self.engine.unclocked,
            "backends": {name: sorted(used) for name, used in self._backends.items()},
        }

    def prompt(self, item: PreparedExample) -> tuple[Tensor, int]:
        """Return the token ids [1 S] of a prompt, and how many of these S are prefilled before the
        seal."""
        ids = torch.tensor([item.prompt.ids], device=self.device)
        context = self._context(item)
        return ids, ids.shape[1] if context is None else context

    def _context(self, item: PreparedExample) -> int | None:
        """Return how many tokens of the prompt are prefilled and sealed before the rest is fed;
        None if the whole prompt is sealed."""
        whole = len(item.prompt.ids)
        context = item.prompt.split if self.settings.protocol == "context" else whole
        if item.by_steps:
            return min(context, max(whole - 1, 1))
        return context if self.settings.protocol == "context" else None

    def ending(self, item: PreparedExample) -> dict[str, Any]:
        """Return the arguments of the engine that say how tokens are picked for `item` and when it
        stops. Sampling uses a seed made from the example's id, so that a resumed run draws the same
        tokens. If the example has a least length, it cannot end earlier."""
        wanted, rule = self.settings.generation, self._rule(item)
        stop: Stop = never if wanted.force_length else rule
        sampler: Sampler = Greedy()
        if wanted.temperature:
            seed = sampling_seed(self.settings.seed, item.example.id)
            generator = torch.Generator(self.device).manual_seed(seed)
            sampler = Sampled(wanted.temperature, wanted.top_k, wanted.top_p, generator)
        in_thought = sampler.pick
        if least := item.example.min_new_tokens:
            sampler = MinLength(sampler, [rule.ends], least)
        if isinstance(rule, ThoughtfulAnswer):
            sampler = rule.picking(in_thought, sampler.pick)
        if item.forced:
            sampler, stop = Forced(torch.tensor([item.forced])), After(len(item.forced))
        return {"max_new_tokens": item.new_tokens, "stops": [stop], "sampler": sampler}

    def output(self, item: PreparedExample, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without what made it stop."""
        return self._rule(item).text(tokens)

    def _rule(self, item: PreparedExample) -> Rule:
        return stop_rule(item, self.loaded.tokenizer, self.loaded.eos_ids)

    def record(self, transcript: Transcript) -> Record:
        replies, save_prompts = list(self._replies(transcript)), self.settings.results.save_prompts
        return record_of(transcript.item, replies, transcript.facts, save_prompts=save_prompts)

    def _replies(self, transcript: Transcript) -> Iterator[dict[str, Any]]:
        """Yield what is known of each turn, by the keys of a line, with its score."""
        item = transcript.item
        turns = item.turns, item.example.turns, transcript.turns, transcript.histories
        for turn, example, generation, history in zip(*turns, strict=True):
            [tokens], [stop] = generation.tokens, generation.stops
            rule = self._rule(turn)
            output = repr(generation.nll[0]) if generation.nll else rule.text(tokens)
            if transcript.choices:
                output = choices_output(transcript.choices)
            yield {
                **scored(self.task, turn, example, rule, output, tokens),
                "context_tokens": self._context(item),
                "stop": stop,
                "token_s": generation.token_s,
                **generation.facts,
                **history,
            }


def _whole_examples(
    items: Iterable[PreparedExample], transcripts: Iterable[Transcript | Failed]
) -> Iterator[Transcript | Failed]:
    """Yield one transcript per example of `items`. The choices of a question come as transcripts of
    their own; they are held back until all are there, and then merged. If one of them fails, so
    does the example."""
    asked = {part.example.id: item for item in items for part in item.parts}
    answered, failed = defaultdict[str, list[Transcript]](list), set[str]()
    for transcript in transcripts:
        item = asked[transcript.item.example.id]
        if item.example.id in failed:
            continue
        if isinstance(transcript, Failed):
            failed.add(item.example.id)
            yield replace(transcript, item=item)
            continue
        if not item.choices:
            yield transcript
            continue
        parts = answered[item.example.id]
        parts.append(transcript)
        if len(parts) == len(item.choices):
            yield _joined(item, answered.pop(item.example.id))


def _joined(item: PreparedExample, parts: Sequence[Transcript]) -> Transcript:
    """Merge the transcripts of the choices of `item` into one. Times and counts are those of the
    first choice, whose clock began with the prefill. The machine's seconds that each choice is
    charged (`share_s`, `decode_share_s`) are added up."""
    first, *others = parts
    generations = [part.turns[0] for part in parts]
    for other in others:
        first.decode.add(other.decode)
    summed = {
        name: sum(getattr(generation, name) for generation in generations)
        for name in ("share_s", "decode_share_s")
    }
    return replace(first, item=item, turns=[replace(generations[0], **summed)], choices=generations)


def _shortened(item: PreparedExample) -> PreparedExample:
    """Return the example cut down for a warm-up: at most two turns, a few tokens per answer, and no
    thought."""
    turns = [
        replace(turn, new_tokens=min(turn.new_tokens, WARMUP_TOKENS)) for turn in item.turns[:2]
    ]
    choices = tuple(choice[:WARMUP_TOKENS] for choice in item.choices)
    return replace(
        item,
        new_tokens=turns[0].new_tokens,
        further=tuple(turns[1:]),
        choices=choices,
        thought=None,
    )
