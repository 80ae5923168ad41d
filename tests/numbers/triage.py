"""Numbers of docs/triage.md: the table of causes that results/published/tables/needles.md holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.numbers.files import PUBLISHED

SHOWN = (  # of docs/triage.md, at 20 %
    *("h2o", "infinigen", "infllm", "lm_infinite", "pyramidkv", "quest"),
    *("shadowkv", "snapkv", "snapkv_kernel15", "streaming"),
)
FULLS = "Full's"
CAUSES = ("inexact", "evicted", "not selected", "sparse prefill")


def held() -> list[str]:
    rows = {row["wrong answers"]: row for row in causes() if row["budget"] == "20%"}
    return [*(f"| {' | '.join(rows[name].values())} |" for name in SHOWN), *_sentences(rows)]


def causes() -> list[dict[str, str]]:
    """The rows of wrong answers in needles.md, each a cell per column as the file writes them."""
    lines = (PUBLISHED / "tables" / "needles.md").read_text("utf-8").splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| wrong answers |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2 : cells.index([""])]]


def _sentences(rows: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    counts = [{cause: int(rows[name][cause] or 0) for cause in CAUSES} for name in SHOWN]
    assert all(sum(found.values()) == int(rows[name]["wrong"]) for name, found in zip(SHOWN, counts, strict=True))
    helped = sum(found["evicted"] + found["not selected"] for found in counts)
    yield f"{helped} of the {sum(int(rows[name]['wrong']) for name in SHOWN)} wrong answers in this table become right"
    assert {rows[name]["needle held (%)"] for name in ("streaming", "lm_infinite")} == {"0.0"}
    yield f"H2O holds {float(rows['h2o']['needle held (%)']):.0f} % of it"
    snapkv, attention = rows["snapkv"], "mass on it (%)"
    yield (
        f"holds {float(snapkv['needle held (%)']):.0f} % of the needle and gives it nearly Full's attention "
        f"({snapkv[attention]} % against {snapkv[f'{FULLS} {attention}']} %)"
    )
    infllm, lm_infinite = rows["infllm"], rows["lm_infinite"]
    yield f"explains {infllm['sparse prefill']} of its {infllm['wrong']} wrong answers"
    yield f"{lm_infinite['sparse prefill']} of its {lm_infinite['wrong']} wrong answers stay wrong"
