"""What is shaken as another CPU would round it, by how much, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.dispatch import BackendError, use_backend
from tests.shaken import SIZE, shaken

X = torch.rand(4, 50, 16, generator=torch.Generator().manual_seed(0)) - 0.5


def off(made: Tensor, plain: Tensor) -> float:
    """The largest difference, as a share of what the result usually is."""
    return float((made - plain).abs().max() / plain.square().mean().sqrt())


def test_what_is_computed_is_shaken_by_so_much() -> None:
    plain = [X @ X.mT, X.softmax(-1), X.double().exp()]
    with shaken(1):
        product, softmax, exact = X @ X.mT, X.softmax(-1), X.double().exp()
    assert SIZE / 3 < off(product, plain[0]) < 5 * SIZE
    assert SIZE / 3 < off(softmax, plain[1]) < 5 * SIZE
    assert 0 < off(exact, plain[2]) < 1e-8 * SIZE / 1e-5


def test_copies_sums_of_two_and_infinity_are_what_they_were() -> None:
    nothing = torch.full((2, 3), float("-inf"))
    rows = torch.tensor([[[3, 1]]])
    with shaken(1):
        assert torch.equal(nothing.logsumexp(-1), nothing[:, 0])
        assert torch.equal(X + X, 2 * X)
        assert torch.equal(ops.gather_rows(X[:1].unsqueeze(0), rows), X[:1, [3, 1]].unsqueeze(0))


def test_equal_seeds_shake_alike_and_others_otherwise() -> None:
    made = []
    for seed in (1, 1, 2):
        with shaken(seed):
            made.append(X @ X.mT)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_what_cpp_computes_is_shaken_too() -> None:
    logits = X[None].transpose(2, 3)
    with use_backend("cpu"):
        try:
            plain = ops.group_weights(logits, 1.0, "sum")
        except BackendError as reason:
            pytest.skip(str(reason))
        with shaken(1):
            made = ops.group_weights(logits, 1.0, "sum")
    assert SIZE / 3 < off(made, plain) < 5 * SIZE
