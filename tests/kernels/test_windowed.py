"""The definition of windowed attention against one query and one key at a time."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kernels import windowed
from tests.kernels.op_cases import WINDOWS, random


@pytest.mark.parametrize("name", WINDOWS)
def test_query_by_query(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "_QUERIES_AT_ONCE", 7)
    new, count, first, window = WINDOWS[name]
    q, k, v = random(1, 2, 6, new, 16), random(2, 2, 2, count, 16), random(3, 2, 2, count, 16)
    given = random(4, 2, 6, new)
    out, lse = windowed.windowed_attention(q, k, v, 0.3, first, window)
    sums = windowed.windowed_sums(q, k, given, 0.3, first, window)
    wanted = torch.zeros_like(sums)
    for head in range(6):
        for t in range(new):
            seen = [j for j in range(count) if 0 <= first + t - j < window]
            if not seen:
                assert lse[:, head, t].tolist() == [float("-inf")] * 2
                assert not out[:, head, t].any()
                continue
            logits = 0.3 * torch.einsum("bd,bsd->bs", q[:, head, t], k[:, head // 3, seen])
            assert_close(out[:, head, t], torch.einsum("bs,bsd->bd", logits.softmax(-1), v[:, head // 3, seen]))
            assert_close(lse[:, head, t], logits.logsumexp(-1))
            wanted[:, head, seen] += (logits - given[:, head, t, None]).exp()
    assert_close(sums, wanted)
