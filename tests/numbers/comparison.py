"""Numbers of docs/comparison.md: what its sentences say of the tables between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evals.stats import ALPHA
from tests.numbers.files import PUBLISHED, line, table

MIB = 2**20
SELECTING = ("oracle", "sparq", "rocketkv", "pqcache", "quest")  # near Full
NEEDLES = {  # rows of the page: the method, and another whose row is the same
    "oracle": "",
    "sparq": "",
    "rocketkv": "",
    "pqcache": "",
    "quest": "",
    "shadowkv": "",
    "infinigen": "",
    "infinigen_alpha99": "",
    "infllm": "",
    "streaming": "lm_infinite",
    "h2o": "",
    "snapkv": "",
    "snapkv_kernel15": "",
    "pyramidkv": "",
    "adakv": "",
}


class Scores:
    """A published table: numbers of its cells, by method (or another key) and budget in percent."""

    def __init__(self, *names: str, key: str = "presets.method") -> None:
        lines = [one for name in names for one in table(f"tables/{name}")]
        self.lines = {(one[key], round(100 * float(one["budget.asked"] or 0))): one for one in lines}

    def of(self, method: str, budget: int = 20, column: str = "score.mean") -> float:
        """In percent; Full has no budget."""
        return 100 * float(self.lines[method, 0 if method == "full" else budget][column])

    def group(self, method: str, budget: int, task: str) -> float:
        return self.of(method, budget, f"score.groups.{task}.mean")

    def loss(self, method: str, budget: int = 20) -> float:
        return self.of("full") - self.of(method, budget)

    def mib(self, method: str, budget: int, *columns: str) -> float:
        return sum(self.of(method, budget, column) for column in columns) / 100 / MIB


OF_2K = Scores("ruler_2k", "ruler_half")
LATER = Scores("ruler_question_later")
DIGITS = "score.averages.leading_digits_share"
DEVICE, HOST, MOVED = "memory.kv_device_bytes", "memory.kv_host_bytes", "memory.moved_bytes_per_step"


def held() -> list[str]:
    parts = (_before, _splits, _perplexity, _traffic, _needles, _reading, _ablations, _codes, _rocketkv)
    return [text for part in parts for text in part()]


def _before() -> Iterator[str]:
    single = "niah_single_2/2048"
    pooled = [OF_2K.group("snapkv_kernel15", budget, single) for budget in (20, 50)]
    plain = [OF_2K.group("snapkv", budget, single) for budget in (20, 50)]
    yield f"at 20 % it scores {plain[0]:.0f} on `niah_single_2`"
    yield f"it scores {pooled[0]:.0f}, and at a budget of 50 % it scores {pooled[1]:.0f} instead of {plain[1]:.0f}"
    score, digits = OF_2K.of("snapkv_kernel15", 10), OF_2K.of("snapkv_kernel15", 10, DIGITS)
    yield f"at 10 % `snapkv_kernel15` scores {score:.0f} on average and gets {digits:.0f} % of the digits right"
    low, middle, high = (int(OF_2K.of("full", 0, f"prompt_tokens.{of}") / 100) for of in ("min", "median", "max"))
    yield f"is often {middle} long"
    yield f"prompts have {low} to {high} tokens"
    yield f"A tenth is then {low // 10} tokens"
    union = OF_2K.of("quest", 20, "budget.union.share")
    yield f"its selecting layers read {(30 * union - 2 * 100) / 28:.0f} % at a budget of 20 %"


def _splits() -> Iterator[str]:
    split = Scores("ruler_one_split")
    yield (
        f"PQCache scores {split.of('pqcache', 10):.1f} instead of {OF_2K.of('pqcache', 10):.1f}, and "
        f"{split.of('pqcache'):.1f} instead of {OF_2K.of('pqcache'):.1f} at 20 %, where SparQ scores "
        f"{split.of('sparq'):.1f} and "
        "moves nearly twice as much"
    )
    assert 1.7 < split.mib("sparq", 20, MOVED) / split.mib("pqcache", 20, MOVED) < 2
    gains = sorted(split.of(method, 10) - OF_2K.of(method, 10) for method in ("oracle", "sparq"))
    yield f"Oracle and SparQ gain {gains[0]:.1f} to {gains[1]:.1f} points at 10 %"


def _perplexity() -> Iterator[str]:
    of = Scores("perplexity")
    costs = {row: float(line["likelihood.full.diff"]) for row, line in of.lines.items() if row[0] != "full"}
    near = {row[0] for row in costs if float(of.lines[row]["likelihood.full.p_holm"]) >= ALPHA}
    assert near == {"oracle", "kivi"}
    assert all(float(of.lines["oracle", budget]["likelihood.full.p_holm"]) >= ALPHA for budget in (10, 20))
    fifth = sorted((cost, method) for (method, budget), cost in costs.items() if budget == 20 and method not in near)
    (lowest, _), *_, (low, _) = fifth[:4]
    assert {method for _, method in fifth[:4]} == {"pqcache", "rocketkv", "infinigen_alpha99", "sparq"}
    yield f"{lowest:.3f} to {low:.3f} nats per token, and the others {fifth[4][0]:.3f} to {fifth[-1][0]:.3f}"
    h2o, snapkv = (of.of(method, 10, "score.averages.perplexity") / 100 for method in ("h2o", "snapkv"))
    yield f"here H2O is ahead ({h2o:.1f} against {snapkv:.1f})"
    needles = {method: OF_2K.of(method, 10) for method in ("h2o", "snapkv", "quest")}
    assert needles["h2o"] == needles["snapkv"]
    yield f"At 10 % H2O and SnapKV both score {needles['h2o']:.1f} under"
    yield f"Quest scores {needles['quest']:.1f} there at 10 %"
    for asked in (10, 20):
        low, high = (float(of.lines["snapkv", asked][f"likelihood.full.ci95.{end}"]) for end in ("low", "high"))
        assert low < costs["streaming", asked] < high
        assert max(costs, key=lambda row: costs[row] * (row[1] == asked)) == ("pyramidkv", asked)
    known = {
        method: [float(of.lines[method, 10][f"likelihood.full.{end}"]) for end in ("diff", "ci95.low", "ci95.high")]
        for method in ("quest", "h2o")
    }
    shown = ["{:.3f} [{:.3f}, {:.3f}]".format(*known[method]) for method in ("quest", "h2o")]
    yield f"costs about as much as H2O: {shown[0]} and {shown[1]} nats per token"


def _traffic() -> Iterator[str]:
    of = Scores("equal_traffic", key="label")
    narrow, wide, codes = "sparq r=1", "sparq r=4", "pqcache m=8 b=8"
    assert max(of.of(narrow, budget) for budget in (10, 20)) < 5, "finds nothing"
    yield (
        f"at 1/16 it scores {of.of(wide, 10):.0f} and {of.of(wide, 20):.0f}, PQCache {of.of(codes, 10):.0f} and "
        f"{of.of(codes, 20):.0f}"
    )
    small = "pqcache m=2 b=8"
    yield (
        f"PQCache's {of.of(small, 10):.1f} at 1/64 is {of.of(small, 10) - OF_2K.of('pqcache', 10):.0f} points above "
        "its row under [other budgets](#other-budgets), where codes have 6 bits"
    )
    more = of.mib(small, 10, DEVICE) - OF_2K.mib("pqcache", 10, DEVICE)
    yield f"256 centroids instead of 64 take {more:.0f} MiB more on the device"
    yield f"Codes of 8 bits help as much as a smaller window ([{of.of(small, 10):.1f}]"


def _needles() -> Iterator[str]:
    of = Scores("needles")
    for method, same in NEEDLES.items():
        shown = f"{method}, {same}" if same else method
        scores = [f"{of.of(method, budget):.0f}" for budget in (10, 20)]
        assert not same or scores == [f"{of.of(same, budget):.0f}" for budget in (10, 20)]
        yield line(shown, *scores).removesuffix(" |")
    assert of.of("full") == 100
    yield "Full finds all 20"
    causes = dict(_causes())
    yield (
        f"Of ShadowKV's {causes['wrong']} wrong answers, {causes['inexact']} are right with exact attention over the "
        "same "
        f"tokens, and in {causes['not selected']} its choice of chunks missed the needle"
    )


def _causes() -> Iterator[tuple[str, int]]:
    """What needles.md says of ShadowKV's wrong answers, both budgets together."""
    lines = (PUBLISHED / "tables" / "needles.md").read_text("utf-8").splitlines()
    [head] = [one.split(" | ") for one in lines if one.startswith("| wrong answers |")]
    found = [one.split(" | ") for one in lines if one.startswith("| shadowkv |") and len(one.split(" | ")) == len(head)]
    for name in ("wrong", "inexact", "not selected"):
        yield name, sum(int(cells[head.index(name)] or 0) for cells in found)


def _reading() -> Iterator[str]:
    text = (PUBLISHED / "tables" / "ruler_2k.md").read_text("utf-8")
    found = re.search(r"must be about ([\d.]+) to ([\d.]+) points", text)
    assert found
    yield f"{float(found[1]):.0f} to {float(found[2]):.0f} points in the table of other budgets"
    losses = [OF_2K.loss(method) for method in SELECTING]
    yield f"RocketKV, PQCache and Quest lose {min(losses):.1f} to {max(losses):.1f} points"
    hard = ("niah_single_2/2048", "niah_multikey_1/2048", "niah_multivalue/2048")
    lost = [OF_2K.group("full", 0, task) - OF_2K.group(m, 10, task) for m in ("sparq", "rocketkv") for task in hard]
    yield f"SparQ and RocketKV at most {max(lost):.0f} points on any"
    harder = [
        1 - OF_2K.group(m, 10, task) / OF_2K.group("full", 0, task) for m in ("pqcache", "quest") for task in hard[1:]
    ]
    assert min(harder) > 0.3
    assert max(harder) < 0.7
    yield "At 10 % PQCache and Quest lose a third to two thirds of the score on the harder tasks"
    evicting = ("h2o", "snapkv", "adakv", "pyramidkv")
    few = [OF_2K.of(method, budget) for method in evicting for budget in (10, 20)]
    half = [OF_2K.of(method, 50) for method in evicting]
    mass = min(OF_2K.of(method, 50, "fidelity.mass") for method in evicting)
    yield (
        f"score {min(few):.0f} to {max(few):.0f} at 10 and 20 %, and {min(half):.0f} to {max(half):.0f} at 50 %, "
        "where StreamingLLM "
        f"has {OF_2K.of('streaming', 50):.0f}, although they hold {mass:.0f} % of the attention mass"
    )
    later = [LATER.of(method) for method in evicting]
    yield f"about the same ({min(later):.0f} to {max(later):.0f})"
    yield f"with kernel 15 it scores {OF_2K.of('snapkv_kernel15', 50):.1f} at 50 %"
    digits = [f"{OF_2K.of(method, 20, DIGITS):.0f}" for method in ("pyramidkv", "snapkv")]
    yield f"as many leading digits right at 20 % ({digits[0]} % against {digits[1]})"
    selecting = [*SELECTING, "shadowkv", "shadowkv_full_rank", "infinigen", "infinigen_alpha99"]
    lost_later = {method: OF_2K.of(method) - LATER.of(method) for method in selecting}
    others = [loss for method, loss in lost_later.items() if method != "infinigen"]
    yield f"costs methods that select {min(others):.0f} to {max(others):.0f} points"
    yield f"InfLLM gains {LATER.of('infllm') - OF_2K.of('infllm'):.0f}"
    yield f"RocketKV loses {lost_later['rocketkv']:.0f}: its eviction"
    usual, wider = (lost_later[method] for method in ("infinigen", "infinigen_alpha99"))
    yield f"InfiniGen loses {usual:.0f}, or {wider:.0f} with the same columns"
    yield f"SnapKV with kernel 15 loses {OF_2K.of('snapkv_kernel15') - LATER.of('snapkv_kernel15'):.0f};"
    assert abs(OF_2K.of("infllm") / OF_2K.of("full") - 1 / 3) < 0.04
    kept, prompts = [], []
    for length in (2, 4, 8):
        of, task = Scores(f"headline_{length}k"), f"niah_multikey_1/{1024 * length}"
        kept.append(100 * of.group("infllm_tuned", 20, task) / of.group("full", 0, task))
        prompts.append(of.lines["full", 0][f"score.groups.{task}.n"])
    yield "Tuned, it keeps {:.0f}, {:.0f} and {:.0f} % of Full's score on `niah_multikey_1`".format(*kept)
    yield "({}, {} and {} prompts): no trend".format(*prompts)


def _ablations() -> Iterator[str]:
    window = Scores("ablation_pqcache", key="label")

    def at(sinks: int, recent: float) -> float:
        return window.of(f"pqcache method.sinks={sinks} recent_ratio={recent}", 10)

    costs = [at(sinks, 0.25) - at(sinks, 0.5) for sinks in (4, 32)]
    yield f"instead of a quarter costs {costs[0]:.0f} points with 4 sinks and {costs[1]:.0f} with 32."
    gained, lost = at(32, 0.25) - at(4, 0.25), at(4, 0.5) - at(32, 0.5)
    yield f"32 sinks instead of 4 gain {gained:.1f} points or cost {lost:.1f}, which"
    shares = Scores("ablation_adakv", key="label")
    equal, unequal = (shares.of(f"adakv kernel=7 floor={floor}", 50) for floor in (1.0, 0.2))
    yield f"Ada-KV's unequal shares cost {equal - unequal:.0f} points under kernel 7"
    pooled = [f"adakv kernel=15 floor={floor}" for floor in (1.0, 0.2)]
    yield f"they cost {shares.of(pooled[0], 50) - shares.of(pooled[1], 50):.1f} points, which"
    low, high = (shares.of(label, 50, "fidelity.kl") / 100 for label in pooled)
    yield f"KL rises from {low:.3f} to {high:.3f}"
    margin = Scores("ablation_infinigen", key="label")

    def guess(alpha: float, ratio: float) -> float:
        return margin.of(f"infinigen alpha={alpha} partial_ratio={ratio}")

    yield f"With 0.4 of the columns instead of 0.2 it scores {guess(5.0, 0.4):.0f} instead of {guess(5.0, 0.2):.0f}"
    yield f"`alpha=99` scores {guess(99.0, 0.2):.0f}, but reads nearly twice as many"
    gains = sorted(guess(99.0, ratio) - guess(5.0, ratio) for ratio in (0.4, 1.0))
    yield f"with good columns it adds {gains[0]:.1f} and {gains[1]:.1f} points"
    chunks = Scores("ablation_shadowkv", key="label")
    smaller = sorted(chunks.of(f"shadowkv_full_rank chunk={size}") for size in (1, 2, 4))
    yield f"Exact keys lift it from {OF_2K.of('shadowkv'):.1f}, its score under"
    exact = OF_2K.of("shadowkv_full_rank")
    yield f"to {exact:.1f}, and smaller chunks from there to {smaller[0]:.1f} to {smaller[-1]:.1f}"


def _codes() -> Iterator[str]:
    """Of PQCache at 8192 tokens: what centroids gain under two windows, and what a smaller window gains."""
    of = Scores("ablation_pqcache_8k", key="label")

    def label(bits: int, recent: float) -> str:
        return f"pqcache b={bits} recent_ratio={recent}"

    centroids = [of.of(label(8, recent)) - of.of(label(6, recent)) for recent in (0.5, 0.25)]
    windows = [of.of(label(bits, 0.25)) - of.of(label(bits, 0.5)) for bits in (6, 8)]
    yield f"256 centroids (b=8) gain {centroids[0]:.0f} and {centroids[1]:.0f} points"
    yield f"a window of a quarter gains {windows[0]:.0f} and {windows[1]:.0f}"
    best, paper = of.lines[label(8, 0.25), 20], of.lines[label(6, 0.5), 20]
    assert float(best["full.p_holm"]) > ALPHA > float(best["likelihood.full.p_holm"])
    yield (
        f"Both together score {of.of(label(8, 0.25)):.0f} and are no longer told from Full by score; the right answer "
        f"still costs {float(best['likelihood.full.diff']):.3f} nats per token more, where the paper's setting costs "
        f"{float(paper['likelihood.full.diff']):.3f}"
    )
    yield f"With 256 centroids in place of 64 it scores {of.of(label(8, 0.25)):.0f}"


def _rocketkv() -> Iterator[str]:
    kept = [100 * OF_2K.mib("rocketkv", budget, HOST) / OF_2K.mib("full", 0, DEVICE) for budget in (10, 20)]
    yield f"{kept[0]:.0f} and {kept[1]:.0f} % of Full's bytes on the host at budgets of 10 and 20 %"
    full = OF_2K.mib("full", 0, DEVICE)
    held = [OF_2K.mib("rocketkv", budget, DEVICE, HOST) for budget in (20, 10)]
    yield f"hold {held[0]:.1f} MiB at 20 %, more than Full's {full:.1f}, and {held[1]:.1f} at 10 %"
    assert held[0] > full
    pooled = OF_2K.mib("snapkv_kernel15", 50, DEVICE), OF_2K.of("snapkv_kernel15", 50)
    yield (
        f"`snapkv_kernel15` at 50 % holds {pooled[0]:.1f} MiB and scores {pooled[1]:.1f}, which 30 prompts cannot tell "
        f"from RocketKV's {OF_2K.of('rocketkv', 10):.1f} at 10 %"
    )
