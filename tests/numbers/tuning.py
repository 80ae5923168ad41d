"""Numbers of docs/tuning.md: limits of a search, and what ablations say of two parameters."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.settings import TUNING_SEED
from harness.tuning.search import COMBINATIONS
from harness.tuning.trials import TOLERANCE
from tests.numbers.comparison import DEVICE, Scores


def held() -> list[str]:
    return [*_limits(), *_ablations()]


def _limits() -> Iterator[str]:
    yield f"a seed of its own ({TUNING_SEED})"
    yield f"(the {COMBINATIONS} most promising by the curves, if there are more)"
    yield f"reads over {100 * TOLERANCE:.0f} % more than the budget allows"


def _ablations() -> Iterator[str]:
    kernels, columns = (Scores(f"ablation_{name}", key="label") for name in ("adakv", "infinigen"))
    assert kernels.of("full") == columns.of("full")
    yield f"where Full scores {columns.of('full'):.0f}"
    short, long = (f"adakv kernel={kernel} floor=1.0" for kernel in (7, 15))
    yield f"SnapKV scores {kernels.of(short, 50):.1f} with it and {kernels.of(long, 50):.1f} with a kernel of 15"
    assert kernels.of(short, 50, DEVICE) == kernels.of(long, 50, DEVICE), "the same bytes"
    few, many = (f"infinigen alpha=5.0 partial_ratio={ratio}" for ratio in (0.2, 0.4))
    reads = [columns.of(name, 20, "budget.attended.share") for name in (few, many)]
    assert abs(reads[0] - reads[1]) < 0.5, "reads as few tokens"
    yield f"scores {columns.of(few):.0f} with them and {columns.of(many):.0f} with 0.4"
    more = columns.of(many, 20, DEVICE) / columns.of(few, 20, DEVICE) - 1
    yield f"holds {100 * more:.0f} % more bytes on the device"
