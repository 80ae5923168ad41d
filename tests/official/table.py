"""`python -m tests.official.table`: write results/published/released_code.csv anew, with KV_HARNESS_CLONES=folder."""

from __future__ import annotations

from tests.official import blocks, codes, evicting, offloading, selecting
from tests.official.comparison import write

ROOMS = (evicting, selecting, blocks, codes, offloading)
COMPARISONS = [comparison for room in ROOMS for comparison in room.COMPARISONS]

if __name__ == "__main__":
    write([comparison.row() for comparison in COMPARISONS])
