"""Numbers of the first section of docs/comparison.md, from the table of the headline at 2048 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from evals.stats import ALPHA
from tests.numbers.files import table

CONF = Path(__file__).parents[2] / "conf"

NEAR = (
    "kivi",
    "oracle",
    "rocketkv",
    "sparq",
    "sparq_tuned",
    "infinigen_tuned",
    "quest_tuned",
    "pqcache_tuned",
    "shadowkv_tuned",
)
EVICTING = ("snapkv", "pyramidkv", "adakv", "h2o")
FULL = "full"


def held() -> Iterator[str]:
    rows = {row["presets.method"]: row for row in table("tables/headline_2k")}
    scores = {name: 100 * float(row["score.mean"]) for name, row in rows.items()}
    experiment = (CONF / "experiment" / "tables" / "headline_2k.yaml").read_text("utf-8")
    chosen = re.search(r"scores (60 to 95) on (20) other", " ".join(experiment.split()).replace(" # ", " "))
    assert chosen
    yield f"Full scores {chosen[1]} on {chosen[2]} other prompts"
    tuned, usual = (_parameters(name) for name in ("shadowkv_tuned", "shadowkv"))
    assert tuned["rank"] == 2 * usual["rank"]
    yield f"with chunks of {tuned['chunk']} and twice the rank"
    near = [scores[name] for name in NEAR]
    assert {name for name, row in rows.items() if name != FULL and not _told(row)} == set(NEAR)
    yield f"They score {min(near):.0f} to {max(near):.0f}, Full {scores[FULL]:.0f}"
    lost, nats = scores[FULL] - scores["pqcache"], float(rows["pqcache"]["likelihood.full.diff"])
    assert not _told(rows["pqcache"], "full")
    assert _told(rows["pqcache"], "likelihood.full")
    yield f"PQCache's score is {lost:.0f} points below Full's, which"
    yield f"costs {nats:.3f} nats per token more"
    evicting = [scores[name] for name in EVICTING]
    yield f"score {min(evicting):.0f} to {max(evicting):.0f} as their authors have them"
    pooled = ("snapkv_tuned", "pyramidkv_tuned", "adakv_tuned")
    yield "{:.0f}, {:.0f} and {:.0f} with a kernel of 31".format(*(scores[name] for name in pooled))
    uuids = [100 * float(rows[name]["score.groups.niah_single_3/2048.mean"]) for name in (*EVICTING, *pooled)]
    assert max(uuids) == 0, "none finds one UUID"
    gains = {name: scores[f"{name}_tuned"] - scores[name] for name in ("infinigen", "quest", "shadowkv")}
    yield f"InfiniGen gains {gains['infinigen']:.0f} points"
    yield f"Quest gains {gains['quest']:.0f} points with pages of 4, ShadowKV gains {gains['shadowkv']:.0f} points"
    assert [name for name in NEAR if _both_tiers(rows[name]) < _both_tiers(rows[FULL])] == ["kivi"]
    steps = {row["presets.method"]: float(row["tpot_s.p50"]) for row in table("tables/headline_2k_times")}
    assert min(steps[name] for name, row in rows.items() if float(row["memory.kv_host_bytes"])) > steps[FULL]
    assert max(steps[name] for name in ("snapkv", "pyramidkv", "streaming")) < steps[FULL]
    yield f"KIVI in 2 bits scores {scores['kivi_2bit']:.0f}"
    presses = {name: score for name, score in scores.items() if name.startswith("press_")}
    best, *others = sorted(presses.values(), reverse=True)
    assert presses["press_chunkkv"] == best
    yield f"ChunkKV's scores {best:.0f}, the others {min(others):.0f} to {max(others):.0f}"


def _told(row: Mapping[str, str], *measures: str) -> bool:
    """Whether it differs from Full after Holm's correction, by any of these measures."""
    return any(float(row[f"{measure}.p_holm"] or 1) < ALPHA for measure in measures or ("full", "likelihood.full"))


def _both_tiers(row: Mapping[str, str]) -> float:
    return sum(float(row[f"memory.kv_{tier}_bytes"]) for tier in ("device", "host"))


def _parameters(preset: str) -> dict[str, Any]:
    parameters: dict[str, Any] = yaml.safe_load((CONF / "method" / f"{preset}.yaml").read_text("utf-8"))
    return parameters
