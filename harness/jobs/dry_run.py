"""`dry_run=true`: prompts, lengths, bytes and folder of a run, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.jobs.examples import by_context, room
from harness.jobs.job import Job
from harness.jobs.machine import refusal
from harness.jobs.memory import full_bytes, largest_batch, sealed_cost, size
from harness.models.remote import RemoteModel
from harness.terminal.notices import alike, say
from methods.base import CostError
from methods.full import Full

SHOWN = 2  # prompts printed
HEAD, TAIL = 300, 300  # characters of each


class Forecast(NamedTuple):
    """Hold what a run would take."""

    prompts: str  # their hash
    prompt_tokens: int
    new_tokens: int  # at most
    memory: int  # the most bytes at once, on its device and in host memory
    is_done: bool  # so that it takes nothing


Forecasts = dict[Path, Forecast]  # by the folder of the run


def show(job: Job, known: Forecasts, *, alone: bool) -> None:
    """Print what a job would do: its first prompts, unless a job in `known` has the same, lengths,
    bytes, budget and folder. Add it to `known`, and the job of Full that runs with it. `alone`: the
    command has no other job, and needs no name for this one."""
    full, settings = job.full, job.settings
    if not alone:
        say(f"=== {job.label}\n")
    shown = {forecast.prompts for forecast in known.values()}
    for one in filter(None, (job, full if settings.baseline == "run" else None)):
        if one.folder not in known:
            known[one.folder] = _forecast(one)
    for item in job.items[:SHOWN] if job.identity["prompts"] not in shown else ():
        text = item.prompt.text
        cut = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} [...] {text[-TAIL:]}"
        head = f"--- {item.example.id}: {len(item.prompt.ids)} tokens, expects {item.example.references}"
        say(f"{head}\n{cut}\n")
    lengths = [item.prompt_tokens for item in job.items]
    contexts = list(by_context(job.items))
    thoughts = [turn.thought.most or 0 for item in job.items for turn in item.turns if turn.thought]
    info = job.model.describe()
    notes = alike([finding.message for item in job.items for finding in item.findings])
    rows = [
        (
            "examples",
            f"{len(lengths)}, of {min(lengths)} to {max(lengths)} prompt tokens, {sum(lengths)} in all",
        ),
        *(
            ("left out", f"{count}: {why}")
            for why, count in alike([example.why for example in job.prompts.left_out])
        ),
        *(
            [("contexts", f"{len(contexts)}, each prefilled once")]
            if settings.questions == "shared"
            else ()
        ),
        *(
            [("thoughts", f"of at most {_range(thoughts)} tokens before the answers")]
            if thoughts
            else ()
        ),
        ("window", f"{info.limit} tokens{info.limit_because}"),
        *(("caution", text) for text in job.facts()["cautions"]),
        *(_of_server(job) if isinstance(job.model, RemoteModel) else _of_engine(job)),
        ("folder", str(job.folder)),
        *([("Full", _beside(full))] if full else ()),
        *(("lint", f"{count} of {len(lengths)} examples: {note}") for note, count in notes),
    ]
    say("\n".join(f"{name:<9} {text}" for name, text in rows) + "\n" * (not alone))


def _of_server(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the rows of a model behind a server: what tells its runs from others."""
    assert isinstance(job.model, RemoteModel)
    said = ", ".join(f"{key}={value}" for key, value in job.model.said().items())
    yield "server", f"{job.model.called}, which says of the model: {said or 'nothing'}"


def _of_engine(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the rows on what our engine takes: weights, budget, bytes, memory, batch."""
    info, settings = job.model.describe(), job.settings
    yield "weights", f"{size(info.weight_bytes(settings.dtype))} in {settings.dtype} ({info.name})"
    yield "budget", _budget(job)
    yield "KV cache", _bytes(job)
    if states := info.state_bytes(settings.dtype):
        yield "states", f"{size(states)} per sequence on the device, in no budget"
    yield "memory", _memory(job)
    if not settings.shared_prefill and settings.history != "store":
        yield "batch", _batch(job)


def _forecast(job: Job) -> Forecast:
    turns = [turn for item in job.items for turn in item.turns]
    need = None if isinstance(job.model, RemoteModel) else job.need()
    return Forecast(
        job.identity["prompts"],
        sum(len(turn.prompt.ids) for turn in turns),
        sum(turn.new_tokens for turn in turns),
        need.total + need.host if need else 0,
        job.is_done(),
    )


def totals(known: Forecasts) -> str:
    """Return a sentence on what all runs of a command take together."""
    ahead = [forecast for forecast in known.values() if not forecast.is_done]
    finished = len(known) - len(ahead)
    more = f"; {finished} more finished already" * bool(finished)
    if not ahead:
        return f"in all    nothing to run{more}"
    prompt_tokens = sum(forecast.prompt_tokens for forecast in ahead)
    new_tokens = sum(forecast.new_tokens for forecast in ahead)
    most = size(max(forecast.memory for forecast in ahead))
    return (
        f"in all    {len(ahead)} runs with those of Full, {prompt_tokens:,} tokens of prompts and at most "
        f"{new_tokens:,} of answers; the largest needs {most}{more}"
    )


def _budget(job: Job) -> str:
    """Return a sentence on how many tokens a step reads, over the layers that have a budget: of the
    prompt, or of prompt and answer where the budget counts both. A prompt that is no longer than the
    method's first and last tokens is read whole."""
    budget, layers = job.budget, range(job.model.describe().num_whole_layers)
    prompts = [tokens for item in job.items for tokens in item.sealed(job.settings.protocol)]
    ruled = [layer for layer in layers if budget is not None and layer not in budget.dense_layers]
    if budget is None or not ruled:
        return f"none: a step reads all of {_range(prompts)} prompt tokens"
    cases = [(tokens, layer) for tokens in {min(prompts), max(prompts)} for layer in ruled]
    dense = (
        f"; all in layers {', '.join(map(str, budget.dense_layers))}" if budget.dense_layers else ""
    )
    use = job.facts()["budget_use"]
    if use["counts"] != "prompt":
        rows = [budget.rows(*case) for case in cases]
        most = room(job.items)
        read = [min(most, some + use["extra_rows"]) if some else most for some in rows]
        return f"a step reads at most {_range(read)} of {most} tokens of prompt and answer{dense}"
    asked = [(tokens, budget.tokens(tokens, layer)) for tokens, layer in cases]
    read = [tokens if job.method.reads_all(tokens, some) else some for tokens, some in asked]
    at_most = "at most " * (budget.mass is not None)
    why = ", all where it cannot hold sinks and window" * (sum(read) > sum(x for _, x in asked))
    return f"a step reads {at_most}{_range(read)} of {_range(prompts)} prompt tokens{why}{dense}"


def _bytes(job: Job) -> str:
    """Return a sentence on the bytes that the method holds after the longest prompts, and on those
    of Full, which keeps all keys and values."""
    info = job.model.describe()
    full = f"{size(full_bytes(info, job.settings, job.items))} for Full at its longest"
    if isinstance(job.method, Full):
        return full
    name = type(job.method).__name__
    try:
        cost = sealed_cost(job.cache_spec, info, job.items)
    except CostError:
        return f"{full}; {name} does not say what it holds"
    amounts = [f"{size(count)} on the {tier}" for tier, count in cost.held.items() if count]
    return f"{' and '.join(amounts)} for {name} once sealed, {full}"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _memory(job: Job) -> str:
    """Return the error with which the run would be refused for lack of memory, or what it needs and
    what is free."""
    need, (free, free_host) = job.need(), job.free
    fits = f"needs {need}; {size(free) if free is not None else 'unknown'} free on {job.settings.device}"
    return refusal(need, job.settings, free, free_host) or fits


def _batch(job: Job) -> str:
    """Return a sentence on how many sequences as long as the longest example fit into memory at
    once."""
    free, free_host = job.free
    if free is None:
        return "unknown: nobody knows how much memory is free"
    longest = max(job.items, key=lambda item: item.room)
    most, tier = largest_batch(job.model.describe(), job.cache_spec, longest, free, free_host)
    return f"at most {most} sequences of {longest.room} tokens fit at once, by the memory of the {tier}"


def _beside(full: Job) -> str:
    """Return the folder of the job of Full (dense attention) that a job is compared with, followed
    by words that say if that is finished, will be run by this command too, or will not."""
    if full.is_done():
        return f"{full.folder}, finished already"
    return f"{full.folder}, " + (
        "runs too" if full.settings.baseline == "run" else "not run with baseline=reuse"
    )
