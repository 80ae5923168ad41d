"""Batched k-means against Lloyd's algorithm, and low-rank factors against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import lowrank, ops
from kernels.dispatch import use_backend
from kernels.lowrank import SOLVERS, gram, leading, low_rank
from tests.kernels.guarded import guarded
from tests.kernels.op_cases import converted


def lloyd(x: Tensor, initial: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """x [P d] -> centroids [C d], codes [P]"""
    centroids = x[initial].clone()
    for _ in range(iterations):
        codes = torch.cdist(x, centroids).argmin(1)
        moved = torch.stack(
            [x[codes == c].mean(0) if (codes == c).any() else centroids[c] for c in range(len(initial))]
        )
        shift, centroids = (moved - centroids).square().sum(), moved
        if shift <= tolerance * x.var(0, correction=0).mean():
            break
    return centroids, torch.cdist(x, centroids).argmin(1)


def points(problems: int, count: int, dim: int) -> Tensor:
    """Clumps, so that the nearest centroid is never a matter of rounding for long."""
    draw = torch.Generator().manual_seed(3)
    centres = 4 * torch.randn(problems, 9, dim, generator=draw)
    clump = torch.randint(9, (problems, count, 1), generator=draw).expand(-1, -1, dim)
    return centres.gather(1, clump) + torch.randn(problems, count, dim, generator=draw)


def run(
    backend: str, x: Tensor, initial: Tensor, *args: object, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    with use_backend(backend):
        if reason := ops.kmeans.refusal(backend, x.to(device), initial.to(device), *args):
            pytest.skip(f"kmeans: {backend}: {reason}")
        inputs = converted((x, initial), dtype, device)
        with guarded(inputs, backend):
            centroids, codes = ops.kmeans(*inputs, *args)
    return centroids.cpu(), codes.cpu()


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.gpu] * (name == "triton")) for name in ops.kmeans.targets]
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("count", "dim", "clusters"),
    [
        (301, 8, 16),
        (517, 6, 5),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1000, 32, 64), (70, 64, 64), (300, 128, 40))),
    ],
)
def test_equals_plain_lloyd(backend: str, count: int, dim: int, clusters: int) -> None:
    x = points(3, count, dim)
    initial = torch.randperm(count, generator=torch.Generator().manual_seed(5))[:clusters]
    centroids, codes = run(backend, x, initial, 4, 0.0)
    for i in range(3):
        wanted, wanted_codes = lloyd(x[i].double(), initial, 4, 0.0)
        assert_close(centroids[i].double(), wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(codes[i].long(), wanted_codes)


@pytest.mark.parametrize(("dtype", "clusters"), [(torch.bfloat16, 64), (torch.float16, 70)])
def test_points_of_16_bits_are_clustered_where_they_lie(backend: str, dtype: torch.dtype, clusters: int) -> None:
    """Keys [B G S D] in a store with room for more, split into sub-vectors: centroids and codes are those of fp32."""
    parts, count = 2, 200  # several pieces, of which the last is not full
    room = torch.full((2, 2, 9, 128), 1e4, dtype=dtype)
    keys = torch.cat([points(4, count, 128).view(2, 2, count, 128).to(dtype), room], 2)
    x = keys[:, :, 3:count].unflatten(3, (parts, -1)).transpose(2, 3)
    initial = torch.randperm(count - 3, generator=torch.Generator().manual_seed(5))[:clusters]
    centroids, codes = run(backend, x, initial, 2, 0.0, dtype=dtype)
    with use_backend("torch"):
        wanted, wanted_codes = ops.kmeans(x.float(), initial, 2, 0.0)
    assert (centroids.dtype, centroids.shape) == (torch.float32, (2, 2, parts, clusters, 128 // parts))
    assert_close(centroids, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(codes.long(), wanted_codes)


def test_an_empty_cluster_keeps_its_centroid(backend: str) -> None:
    x = torch.tensor([[0.0], [0.0], [1.0], [5.0]]).unsqueeze(0)  # the points 0 and 1 are one: the second is left empty
    centroids, codes = run(backend, x, torch.tensor([0, 1, 3]), 1, 0.0)
    assert centroids.flatten().tolist() == pytest.approx([1 / 3, 0.0, 5.0])
    assert codes.flatten().tolist() == [1, 1, 0, 2]


def test_stops_when_all_problems_are_still(backend: str) -> None:
    x, initial = points(2, 100, 4), torch.arange(8)
    still = run(backend, x, initial, 20, 1e-4)
    assert_close(run(backend, x, initial, 21, 1e-4), still, atol=0, rtol=0)
    shift = (run(backend, x, initial, 20, 0.0)[0] - still[0]).square().sum((1, 2))
    assert bool((shift <= 100 * 1e-4 * x.var(1).mean(-1)).all())


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


def spectrum(name: str, size: int, rank: int) -> Tensor:
    """Return singular values [size] of keys, the largest first."""
    place = torch.arange(1, size + 1, dtype=torch.float64)
    falling = place**-0.75  # as keys before their rotation have it
    return {
        "as of keys": falling.index_fill(0, torch.tensor([0]), 10),  # with a mean key far from zero
        "nearly equal at the rank": torch.where((place - rank).abs() < 9, falling[rank] * (1 - 1e-6 * place), falling),
        "of a huge range": torch.logspace(0, -6, size, dtype=torch.float64),
        "hardly falling": torch.linspace(1, 0.9, size, dtype=torch.float64),
        "of few directions": falling * (place <= rank // 2),
    }[name]


def drawn(values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return a matrix [rows C] with these singular values [C] and its right singular vectors, in fp64."""
    draw = torch.Generator().manual_seed(2)
    sides = (torch.randn(count, len(values), dtype=torch.float64, generator=draw) for count in (rows, len(values)))
    left, right = (torch.linalg.qr(side).Q for side in sides)
    return (left * values) @ right.mT, right


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("as of keys", True), ("nearly equal at the rank", True), ("of a huge range", True), ("hardly falling", False),
        ("of few directions", None),
    ],
)  # fmt: skip
def test_the_strongest_directions_alone_are_those_of_all(name: str, alone: bool | None) -> None:
    """Rebuilt rows differ from those of the exact truncation by less than bfloat16's rounding, which is 2^-9 of an
    entry: by 2^-12 of a row, and of the entries of ordinary size. A spectrum that hardly falls is left to the solver
    of all directions."""
    rank, size = 80, 512
    x, right = drawn(spectrum(name, size, rank), 1100)
    x[:40] = x[40:80]  # rows that come twice
    x[80:90] = 0
    right = torch.linalg.svd(x, full_matrices=False).Vh.mT
    exact = x @ right[:, :rank] @ right[:, :rank].mT
    basis = leading(gram(x), rank)
    if alone is not None:
        assert (basis is not None) == alone
    u, factor = low_rank(x.float(), rank, "gram_fp64")
    rebuilt = [(u @ factor).double(), *([] if basis is None else [x @ basis @ basis.mT])]
    for rows in rebuilt:
        wrong = (rows - exact).norm(dim=1)
        assert bool((wrong <= 2**-12 * x.norm(dim=1)).all())
        assert_close(rows, exact, rtol=2**-9, atol=2**-9 * float(exact.square().mean().sqrt()))


def test_a_cpu_computes_all_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the strongest ones alone take as long, and keys would round differently."""
    monkeypatch.setattr(lowrank, "leading", lambda *_: pytest.fail("a CPU need not try it"))
    x = torch.randn(700, 512)
    u, basis = low_rank(x, 80, "gram_fp64")
    exact = torch.linalg.eigh(gram(x)).eigenvectors.flip(-1)[:, :80].float()
    assert torch.equal(basis, exact.T)
    assert torch.equal(u, x @ exact)


@pytest.mark.parametrize(("rows", "rank"), [(60, 60), (100, 80)])
def test_fewer_rows_than_directions(rows: int, rank: int) -> None:
    x = torch.randn(2, rows, 512)
    x[1] = 0
    u, basis = low_rank(x, rank, "gram_fp64")
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    assert_close((u @ basis).double(), (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank], atol=1e-5, rtol=0)
