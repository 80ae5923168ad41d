"""Computes low-rank factors and principal directions of tall matrices, by way of their small Gram
matrix."""

from __future__ import annotations

import torch
from torch import Tensor

SOLVERS = ("gram_fp64", "gram_fp32", "thin_svd")
ROWS_AT_ONCE = 1 << 12  # bounds the copy in the Gram matrix's precision


def gram(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return x^T x, not centred. x [... N C] -> [... C C]"""
    total = torch.zeros(*x.shape[:-2], x.shape[-1], x.shape[-1], dtype=dtype, device=x.device)
    for rows in x.split(ROWS_AT_ONCE, dim=-2):
        rows = rows.to(dtype)
        total += rows.transpose(-1, -2) @ rows
    return total


def directions(gram_matrix: Tensor) -> Tensor:
    """Return the orthonormal right singular vectors of a matrix from its Gram matrix, as columns,
    the strongest first. [... C C]"""
    return torch.linalg.eigh(gram_matrix).eigenvectors.flip(-1)


def low_rank(x: Tensor, rank: int, solver: str) -> tuple[Tensor, Tensor]:
    """Factor each matrix x [... N C] (fp32) so that u @ basis is its best approximation of rank r =
    `rank`. Return u [... N r], basis [... r C]. `solver`: gram_fp64, gram_fp32 or thin_svd.

    Solvers agree on the product, but not on the factors. Those by the Gram matrix take N C^2
    operations and no copy of x; in fp32 it loses the directions whose singular values are below
    about 3e-4 of the largest, in fp64 none that fp32 data hold."""
    if solver == "thin_svd":
        left, values, right = torch.linalg.svd(x, full_matrices=False)
        return left[..., :rank] * values[..., None, :rank], right[..., :rank, :]
    basis = directions(gram(x, torch.float64 if solver == "gram_fp64" else torch.float32))[..., :rank].to(x.dtype)
    return x @ basis, basis.transpose(-1, -2)
