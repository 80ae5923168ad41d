"""Low-rank factors against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from kernels.lowrank import SOLVERS, directions, gram, low_rank


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("rows", "rank"), [(5000, 7), (12, 12), (9, 3)])
def test_the_product_is_the_truncated_svd(solver: str, rows: int, rank: int) -> None:
    x = torch.randn(2, rows, 16) * torch.logspace(0, -1.5, 16)
    u, basis = low_rank(x, rank, solver)
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values[:, rank:] = 0
    torch.testing.assert_close((u @ basis).double(), left @ torch.diag_embed(values) @ right, atol=1e-4, rtol=1e-3)
    assert u.shape == (2, rows, min(rank, rows))
    assert u.dtype == torch.float32


def test_directions_are_not_centred_and_the_strongest_comes_first() -> None:
    x = torch.randn(300, 8) * 0.1 + torch.tensor([0, 0, 0, 5.0, 0, 0, 0, 0])
    found = directions(gram(x))
    assert found[3, 0].abs() > 0.99
    lengths = (x.double() @ found).norm(dim=0)
    assert (lengths[:-1] >= lengths[1:]).all()
