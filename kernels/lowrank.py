"""Computes low-rank factors and principal directions of tall matrices, by way of their small Gram
matrix."""

from __future__ import annotations

from math import cos, pi

import torch
from torch import Tensor

from kernels.matmul import matmul

SOLVERS = ("gram_fp64", "gram_fp32", "thin_svd")
ROWS_AT_ONCE = 1 << 12  # bounds the copy in the Gram matrix's precision
_PLAIN, _SHIFTED = 4, 8  # rounds of subspace iteration, without and with a shift
# columns of a Gram matrix, below which all its eigenvectors are computed as fast as a few
_SMALLEST = 512
_TOLERANCE = 2**-12  # an eighth of what rounding a key to bfloat16 changes


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


def leading(gram_matrix: Tensor, rank: int) -> Tensor | None:
    """Return an orthonormal basis of the space of the `rank` strongest right singular vectors of a
    matrix, from its Gram matrix in fp64: [... C C] -> [... C rank]. Return None if these vectors
    could not be told from the others well enough; `directions` must then compute them.

    Subspace iteration needs a few products of matrices where computing all eigenvectors takes
    thousands of small steps. It runs on half as many columns more than wanted, orthogonalised by
    Cholesky factors, and ends with a Rayleigh-Ritz step. The shifts are the roots of a Chebyshev
    polynomial, so that what lies below the last column's eigenvalue shrinks fastest (Zhou et al.,
    J. Comput. Phys. 219, 2006). By the residuals of the Ritz vectors, the projection of any row
    onto the basis differs from the exact one by at most 2^-12 of the row's norm. The host waits for
    the device twice or three times."""
    size, more = gram_matrix.shape[-1], max(8, rank // 2)
    wide = rank + more
    draw = torch.Generator(gram_matrix.device).manual_seed(0)
    block = torch.randn(
        size, wide, generator=draw, dtype=gram_matrix.dtype, device=gram_matrix.device
    )
    block = block.expand(*gram_matrix.shape[:-1], wide)
    lowest = torch.zeros((), device=gram_matrix.device)
    for step in range(_PLAIN + _SHIFTED):
        image = gram_matrix @ block
        if step >= _PLAIN:
            image -= block * lowest * (1 - cos((step - _PLAIN + 0.5) * pi / _SHIFTED)) / 2
        factor = torch.linalg.cholesky_ex(image.mT @ image).L
        block = torch.linalg.solve_triangular(factor.mT, image, upper=True, left=False)
        if step < _PLAIN:
            lowest = factor[..., -1:, -1:]  # tends to the last column's eigenvalue
    straight = torch.eye(wide, dtype=block.dtype, device=block.device)
    # a factor did not exist: too few directions
    if not bool(((block.mT @ block - straight).abs() < 1e-9).all()):
        return None
    image = gram_matrix @ block
    values, turn = (x.flip(-1) for x in torch.linalg.eigh(block.mT @ image))
    block, residual = block @ turn, image @ turn - (block @ turn) * values.unsqueeze(-2)
    overlap = residual.mT @ residual
    # from what the columns do not span
    apart = values[..., :rank] - values[..., rank + more // 2, None]
    leak = overlap.diagonal(dim1=-2, dim2=-1)[..., :rank] / apart.square()
    gaps = values[..., :rank, None] - values[..., None, rank:]
    # with the columns beyond the rank
    mixed = overlap[..., :rank, rank:] / (apart.unsqueeze(-1) * gaps)
    error = (leak.sum(-1) + mixed.square().sum((-1, -2))).sqrt()
    return block[..., :rank] if bool((error <= _TOLERANCE).all()) else None


def low_rank(x: Tensor, rank: int, solver: str) -> tuple[Tensor, Tensor]:
    """Factor each matrix x [... N C] (fp32) so that u @ basis is its best approximation of rank r =
    `rank`. Return u [... N r], basis [... r C]. `solver`: gram_fp64, gram_fp32 or thin_svd.

    Solvers agree on the product, but not on the factors. Those by the Gram matrix take N C^2
    operations and no copy of x; in fp32 it loses the directions whose singular values are below
    about 3e-4 of the largest, in fp64 none that fp32 data hold. On a GPU, in fp64, a small part of
    many directions is computed alone, if `leading` can; a CPU computes all of them as fast."""
    if solver == "thin_svd":
        left, values, right = torch.linalg.svd(x, full_matrices=False)
        return left[..., :rank] * values[..., None, :rank], right[..., :rank, :]
    total = gram(x, torch.float64 if solver == "gram_fp64" else torch.float32)
    few = (
        x.is_cuda
        and total.dtype == torch.float64
        and x.shape[-1] >= _SMALLEST
        and 4 * rank <= x.shape[-1]
    )
    basis = leading(total, rank) if few else None
    basis = (directions(total)[..., :rank] if basis is None else basis).to(x.dtype)
    return matmul(x, basis), basis.transpose(-1, -2)
