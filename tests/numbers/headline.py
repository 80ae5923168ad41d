"""Numbers of docs/comparison.md that the headline tables have, at 2048, 4096 and 8192 tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from evals.stats import ALPHA
from tests.numbers.files import PUBLISHED, table

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
    yield from _two_k()
    yield from _four_k()
    yield from _eight_k()


def _two_k() -> Iterator[str]:
    rows, scores = _rows("2k")
    chosen = re.search(r"scores (60 to 95) on (20) other", _experiment("2k"))
    assert chosen
    yield f"Full scores {chosen[1]} on {chosen[2]} other prompts"
    tuned, usual = (_parameters(name) for name in ("shadowkv_tuned", "shadowkv"))
    assert tuned["rank"] == 2 * usual["rank"]
    yield f"with chunks of {tuned['chunk']} and twice the rank"
    near = [scores[name] for name in NEAR]
    assert {name for name, row in rows.items() if name != FULL and not _told(row)} == set(NEAR)
    yield f"They score {min(near):.0f} to {max(near):.0f}, Full {scores[FULL]:.0f}"
    yield f"A loss below {_unseen('2k')} points may go unseen by the score of {rows[FULL]['num_examples']} prompts"
    lost, nats = scores[FULL] - scores["pqcache"], float(rows["pqcache"]["likelihood.full.diff"])
    assert not _told(rows["pqcache"], "full")
    assert _told(rows["pqcache"], "likelihood.full")
    yield f"PQCache's score is {lost:.0f} points below Full's, which may be chance"
    yield f"costs {nats:.3f} nats per token more, which is not"
    assert _told(rows["quest"], "full")
    assert not _told(rows["quest"], "likelihood.full")
    yield f"Quest with its authors' pages loses {scores[FULL] - scores['quest']:.0f} points"
    evicting = [scores[name] for name in EVICTING]
    yield f"score {min(evicting):.1f} to {max(evicting):.1f} as their authors have them"
    pooled = ("snapkv_tuned", "pyramidkv_tuned", "adakv_tuned")
    yield "{:.0f}, {:.0f} and {:.0f} with a kernel of 31".format(*(scores[name] for name in pooled))
    uuids = [100 * float(rows[name]["score.groups.niah_single_3/2048.mean"]) for name in (*EVICTING, *pooled)]
    assert max(uuids) == 0, "none finds one UUID"
    six = ("infinigen", "snapkv", "pyramidkv", "adakv", "quest", "shadowkv")
    ends = [(float(rows[f"{name}_tuned"]["score.ci95.low"]), float(rows[name]["score.ci95.high"])) for name in six]
    assert [name for name, (low, high) in zip(six, ends, strict=True) if low < high] == ["shadowkv"]
    gains = {name: scores[f"{name}_tuned"] - scores[name] for name in ("infinigen", "quest", "shadowkv")}
    yield f"InfiniGen gains {gains['infinigen']:.0f} points"
    usual, tuned = (100 * float(rows[name]["budget.attended.share"]) for name in ("infinigen", "infinigen_tuned"))
    yield f"but then attends {tuned:.0f} % of the prompt instead of {usual:.0f}"
    yield f"Quest gains {gains['quest']:.0f} points with pages of 4, and reads half as much again"
    read = {row["presets.method"]: float(row["memory.read_bytes_per_step"]) for row in table("tables/headline_2k_read")}
    assert 1.45 < read["quest_tuned"] / read["quest"] < 1.55
    yield f"ShadowKV gains {gains['shadowkv']:.0f} points"
    assert [name for name in NEAR if _both_tiers(rows[name]) < _both_tiers(rows[FULL])] == ["kivi"]
    steps = {row["presets.method"]: float(row["tpot_s.p50"]) for row in table("tables/headline_2k_times")}
    assert min(steps[name] for name, row in rows.items() if float(row["memory.kv_host_bytes"])) > steps[FULL]
    assert max(steps[name] for name in ("snapkv", "pyramidkv", "streaming")) < steps[FULL]
    yield f"KIVI in 2 bits scores {scores['kivi_2bit']:.0f}"
    presses = {name: score for name, score in scores.items() if name.startswith("press_")}
    best, *others = sorted(presses.values(), reverse=True)
    assert presses["press_chunkkv"] == best
    yield f"ChunkKV's scores {best:.0f}, the others {min(others):.0f} to {max(others):.0f}"


def _four_k() -> Iterator[str]:
    rows, scores = _rows("4k")
    easy, hard = (
        {name: 100 * float(row[f"score.groups.{task}/4096.mean"]) for name, row in rows.items()}
        for task in ("niah_multikey_1", "niah_single_3")
    )
    band, alone, nearest = _tasks("4k")
    yield f"on 20 other prompts Full scores {band} on one task alone, `niah_single_3` ({alone})"
    yield f"`niah_multikey_1` ({nearest}): {rows[FULL]['score.groups.niah_multikey_1/4096.n']} prompts each"
    near = {name for name, row in rows.items() if name != FULL and not _told(row)}
    assert near == {
        method if f"{method}_tuned" not in rows else f"{method}_tuned"
        for method in ("infinigen", "kivi", "oracle", "pqcache", "quest", "rocketkv", "shadowkv", "sparq")
    }
    yield f"{_range(scores[method] for method in near)}, Full {scores[FULL]:.0f}"
    yield f"A loss below {_unseen('4k')} points may go unseen"
    typical = max(float(rows[method]["likelihood.full.diff"]) for method in near)
    yield f"typically costs {typical:.3f} nats per token more at most"
    means = sorted((float(rows[method]["likelihood.full.mean_diff"]), method) for method in near)
    (others, _), (shadowkv, second), (pqcache, first) = means[-3:]
    assert (first, second) == ("pqcache_tuned", "shadowkv_tuned")
    yield (f"are {pqcache:.3f} under PQCache, {shadowkv:.3f} under ShadowKV, and at most {others:.3f} under the others")
    voting = ("snapkv_tuned", "pyramidkv_tuned", "adakv_tuned")
    yield f"they score {_range(easy[method] for method in voting)} on `niah_multikey_1`"
    yield f"and {_range(hard[method] for method in voting)} on UUIDs, where Full scores {hard[FULL]:.0f}"
    assert not any(_told(rows[method], "full") for method in voting)
    assert all(_told(rows[method], "likelihood.full") for method in voting)
    yield f"Full scored {alone} on `niah_single_3` there, and scores {hard[FULL]:.0f} here"


def _eight_k() -> Iterator[str]:
    rows, scores = _rows("8k")
    _, alone, nearest = _tasks("8k")
    yield f"`niah_single_1` (Full {alone} on other prompts) and again `niah_multikey_1` ({nearest})"
    yield f"{rows[FULL]['score.groups.niah_single_1/8192.n']} prompts each"
    below = {name: row for name, row in _rows("4k")[0].items() if not name.startswith((FULL, "kivi"))}
    best = sorted(below, key=lambda name: (-float(below[name]["score.mean"]), float(below[name]["likelihood.mean"])))
    assert set(rows) == {FULL, "kivi", "kivi_2bit", *best[:10]}, "KIVI, and the ten others that scored best at 4096"
    tied = [below[name]["score.mean"] for name in best if name in ("snapkv_tuned", "adakv_tuned")]
    assert tied == [below[best[9]]["score.mean"]] * 2, "for the last place"
    near = {name for name, row in rows.items() if name != FULL and not _told(row)}
    assert near == {
        *(f"{method}_tuned" for method in ("infinigen", "infllm", "pyramidkv", "shadowkv", "snapkv", "sparq")),
        "rocketkv",
    }
    yield f"{_range(scores[method] for method in near)}, Full {scores[FULL]:.0f}"
    by_cost = ("oracle", "quest_tuned", "kivi")
    yield f"a loss below {_unseen('8k')} points may go unseen by the score of {rows[FULL]['num_examples']} prompts"
    hard = [100 * float(rows[name]["score.groups.niah_multikey_1/8192.mean"]) for name in ("infllm_tuned", FULL)]
    yield f"InfLLM scores {hard[0]:.0f} on `niah_multikey_1`, Full {hard[1]:.0f}"
    told_by_cost_alone = {
        name for name, row in rows.items() if _told(row, "likelihood.full") and not _told(row, "full")
    }
    assert told_by_cost_alone == {*by_cost, "pqcache_tuned"}
    costs = sorted(float(rows[method]["likelihood.full.diff"]) for method in by_cost)
    yield f"which score {_range(scores[method] for method in by_cost)} and under which the right answer costs"
    yield f"{costs[0]:.3f} to {costs[-1]:.3f} nats per token more, and PQCache"
    own = [float(row["likelihood.mean"]) for row in table("tables/headline_8k_floor")]
    yield f"Arithmetic moves Full's own cost by {max(own) - min(own):.4f}"
    ends = {
        name: [float(row[f"likelihood.full.ci95.{end}"]) for end in ("low", "high")]
        for name, row in rows.items()
        if name != FULL and not _told(row, "likelihood.full")
    }
    without_zero = {name: span for name, span in ends.items() if span[0] * span[1] > 0}
    assert set(without_zero) == {"infinigen_tuned", "snapkv_tuned"}
    yield "InfiniGen's cost, [{:+.3f}, {:+.3f}], and".format(*without_zero["infinigen_tuned"])
    yield "SnapKV's, [{:+.3f}, {:+.4f}], leave out 0".format(*without_zero["snapkv_tuned"])
    yield f"At 5 % each, {2 * (len(rows) - 1)} tests"
    assert {scores["snapkv_tuned"], scores["pyramidkv_tuned"]} == {scores["oracle"]}, "as Oracle does"
    yield f"SnapKV and PyramidKV score {scores['snapkv_tuned']:.0f}, as Oracle does"
    behind = float(rows["pqcache_tuned"]["likelihood.full.diff"])
    yield f"it scores {scores['pqcache_tuned']:.0f}, and the right answer costs {behind:.3f} nats per token more"


def _rows(length: str) -> tuple[dict[str, dict[str, str]], dict[str, float]]:
    """The rows of a headline table by method, and their scores in percent."""
    rows = {row["presets.method"]: row for row in table(f"tables/headline_{length}")}
    return rows, {name: 100 * float(row["score.mean"]) for name, row in rows.items()}


def _tasks(length: str) -> tuple[str, str, str]:
    """The band that Full's score should lie in, its score on the one task where it does, and on the task nearest."""
    chosen = r"scores (60 to 95) on 20 other prompts .*which is (\d+), and the nearest .* errs at all, (\d+)"
    found = re.search(chosen, _experiment(length))
    assert found
    return found[1], found[2], found[3]


def _unseen(length: str) -> str:
    """The loss, in points, that the table's page says its prompts may hide."""
    page = (PUBLISHED / "tables" / f"headline_{length}.md").read_text("utf-8")
    found = re.search(r"a loss below (\d+) points may go unseen", page)
    assert found
    return found[1]


def _experiment(length: str) -> str:
    """The yaml of a headline table as one line, without the marks of its comment."""
    text = (CONF / "experiment" / "tables" / f"headline_{length}.yaml").read_text("utf-8")
    return " ".join(text.split()).replace(" # ", " ")


def _range(values: Iterable[float]) -> str:
    ordered = sorted(values)
    low, high = f"{ordered[0]:.0f}", f"{ordered[-1]:.0f}"
    return low if low == high else f"{low} to {high}"


def _told(row: Mapping[str, str], *measures: str) -> bool:
    """Whether it differs from Full after Holm's correction, by any of these measures."""
    return any(float(row[f"{measure}.p_holm"] or 1) < ALPHA for measure in measures or ("full", "likelihood.full"))


def _both_tiers(row: Mapping[str, str]) -> float:
    return sum(float(row[f"memory.kv_{tier}_bytes"]) for tier in ("device", "host"))


def _parameters(preset: str) -> dict[str, Any]:
    parameters: dict[str, Any] = yaml.safe_load((CONF / "method" / f"{preset}.yaml").read_text("utf-8"))
    return parameters
