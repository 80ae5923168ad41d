"""Rotates keys, values and queries of a head by one fixed random rotation, so that no channel is
larger than the others (QuaRot, arXiv 2404.00456; TurboQuant, arXiv 2504.19874).

Products do not change if both sides are rotated. So a step rotates its query once, attends to keys
and values that stay rotated, and rotates the output back once."""

from __future__ import annotations

from functools import cache
from math import sqrt

import torch
from torch import Tensor


@cache
def rotation(dim: int, seed: int, device: torch.device) -> Tensor:
    """Return a random orthogonal matrix, [dim dim] fp32 on `device`, whose rows are the new axes.

    If `dim` is a power of two it is a Hadamard matrix with random signs of its columns. Otherwise
    it is the Q of a random matrix's QR decomposition, as in the paper of TurboQuant."""
    drawn = torch.Generator().manual_seed(seed)
    if dim & (dim - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < dim:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        matrix = matrix * (2 * torch.randint(2, (dim,), generator=drawn) - 1) / sqrt(dim)
    else:
        matrix, upper = torch.linalg.qr(torch.randn(dim, dim, generator=drawn, dtype=torch.float64))
        # else the decomposition's habits would show in the rotation
        matrix = matrix * upper.diagonal().sign()
    return matrix.float().contiguous().to(device)


def rotate(x: Tensor, seed: int) -> Tensor:
    """Return vectors [... D] in the rotated space, in fp32."""
    return x.float() @ rotation(x.shape[-1], seed, x.device).T


def rotate_back(x: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Return rotated vectors [... D] as they were, in `dtype`."""
    return (x.float() @ rotation(x.shape[-1], seed, x.device)).to(dtype)
