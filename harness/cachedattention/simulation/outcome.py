"""The figures of simulated runs: hit rates, times and costs, as rows for a terminal, JSON and CSV.

The hit rate counts all turns as the paper's figures do, also first turns, which have no history to
be found. `returning` is the share of turns that have one: all but first turns and those that fill
the window by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from harness.cachedattention.facts import hit_rates
from harness.cachedattention.simulation.costs import Costs
from harness.cachedattention.simulation.scenario import Scenario, varied
from harness.cachedattention.simulation.server import ServedTurn, Server
from harness.cachedattention.simulation.trace import statistics
from harness.config.settings import SettingsError
from harness.terminal.tables import Column, number, quantity, share, text_table
from methods.tiers.tier import DISK, HOST, TIERS

SimulatedRow = dict[str, Any]
GB = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "B"))


def simulated(scenario: Scenario, costs: Costs) -> SimulatedRow:
    """Simulate one run. Return a dictionary of three: its `settings`, statistics of its `trace`
    (the conversations), and its `figures` (hit rates, times, costs)."""
    server = Server(scenario, costs)
    trace = scenario.trace()
    turns = sum(len(one.turns) for one in trace)
    if scenario.warmup >= turns:
        raise SettingsError(
            f"warmup={scenario.warmup} leaves none of the {turns} turns of the trace to count: set warmup={turns // 5} "
            f"or sessions={scenario.sessions * (2 + scenario.warmup // turns)}."
        )
    counted = server.serve(trace)[scenario.warmup :]
    return {
        "settings": asdict(scenario),
        "trace": statistics(trace),
        "figures": _figures(server, counted) | _cost(server, counted, costs),
    }


def _figures(server: Server, jobs: Sequence[ServedTurn]) -> SimulatedRow:
    """Return hit rates, times and counts of a simulated run over the turns `jobs`, which are those
    after the warm-up. The conversations served per hour, those dropped from the store, and the
    bytes that the disk read and wrote are counted over the whole run."""
    turns = pd.DataFrame(jobs)
    hits, returning = turns["tier"].notna(), turns["history"] > 0
    prompt, prefill_s = turns["question"].sum() + turns["history"].sum(), turns["prefill_s"].sum()
    return {
        "turns": len(jobs),
        "returning": returning.mean(),
        **hit_rates([job.tier for job in jobs]),
        "hit_rate_returning": hits.sum() / max(1, returning.sum()),
        "reused_tokens": turns["history"][hits].sum() / prompt,
        "ttft_s": turns["prefill_s"].mean(),
        "ttft_p90_s": turns["prefill_s"].quantile(0.9),
        "wait_s": turns["wait_s"].mean(),
        "wait_p90_s": turns["wait_s"].quantile(0.9),
        "prefill_tok_s": prompt / prefill_s,
        "prefill_s_per_token": prefill_s / prompt,
        "load_s": turns["load_s"].mean(),
        "load_exposed_s": turns["exposed_s"].mean(),
        "sessions_per_hour": _most_sessions(server.jobs),
        "dropped_sessions": sum(move.target is None for move in server.moves),
        "disk_written_bytes": server.disk.written_bytes,
        "disk_read_bytes": server.disk.read_bytes,
    }


def _cost(server: Server, jobs: Sequence[ServedTurn], costs: Costs) -> SimulatedRow:
    """Return the GPU hours and dollars that the simulated server takes for the turns `jobs`. GPU
    time is the time in which the server is busy; storage is paid for during that time, used or not.

    `gpu_hours_with_halts` and `cost_usd_with_halts` count a prefill twice if other conversations
    were decoding and had to halt for it, as the GPU time that the CachedAttention paper reports may
    do."""
    hours = sum(job.busy_s for job in jobs) / 3600
    halts = sum(job.prefill_s for job in jobs if job.halts) / 3600
    sizes = server.scenario.capacities if server.store else dict.fromkeys(TIERS, 0)
    gpus, storage = costs.prices.usd(1.0, server.model.gpus, sizes[HOST], sizes[DISK])
    return {
        "gpu_hours": hours,
        "cost_usd": hours * (gpus + storage),
        "gpu_hours_with_halts": hours + halts,
        "cost_usd_with_halts": (hours + halts) * (gpus + storage),
        "storage_share": storage / (gpus + storage),
    }


def _most_sessions(jobs: Sequence[ServedTurn]) -> int:
    """Return the largest number of different conversations that were served within any hour."""
    recent: Counter[str] = Counter()
    most = first = 0
    for job in jobs:
        recent[job.session] += 1
        while jobs[first].start_s <= job.start_s - 3600:
            recent[jobs[first].session] -= 1
            if not recent[jobs[first].session]:
                del recent[jobs[first].session]
            first += 1
        most = max(most, len(recent))
    return most


def table(rows: Sequence[SimulatedRow], runs: Sequence[Scenario]) -> str:
    """Return the terminal's table of simulated runs, one line each: the keys that differ between
    the runs, and the figures."""

    def each(key: str) -> list[Any]:
        return [row["figures"][key] for row in rows]

    named = [
        Column(key, "", [str(getattr(run, key)) for run in runs], left=True) for key in varied(runs)
    ]
    shares = {
        "hit_rate": "hits",
        **{f"hit_rate_{tier}": f"{tier}\nhits" for tier in TIERS},
        "returning": "returning",
    }
    figures = [
        *(share(head, [value or None for value in each(key)]) for key, head in shares.items()),
        number("TTFT", "s", each("ttft_s")),
        number("p90", "s", each("ttft_p90_s")),
        number("queue", "s", each("wait_s")),
        number("prefill", "Ktok/s", [rate / 1000 for rate in each("prefill_tok_s")]),
        number("GPU time", "h", each("gpu_hours")),
        number("cost", "$", each("cost_usd")),
        share("storage", [value or None for value in each("storage_share")]),
        quantity("disk\nwritten", each("disk_written_bytes"), GB, hide_zeros=True),
        quantity("disk\nread", each("disk_read_bytes"), GB, hide_zeros=True),
    ]
    return text_table([*named, *figures])
