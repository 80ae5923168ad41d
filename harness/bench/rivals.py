"""What a user would take in place of an operation: transformers' attention, faiss, torch.compile, torch's own gather
and scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness.bench.common.measure import Call
from harness.bench.op_cases import OpCase
from kernels import block
from kernels.reference import Segment


class Rival(NamedTuple):
    name: str
    call: Call | None  # None: it cannot run here, and `name` says why


def rival(case: OpCase, compiled: bool = False) -> Rival | None:
    """None where there is nothing that one would take. compiled: torch.compile is taken for the model's own parts."""
    if compiled and hasattr(block, case.op):
        return _compiled(case)
    make = _RIVALS.get(case.op)
    return None if make is None else make(*case.args)


def _compiled(case: OpCase) -> Rival:
    """Inductor's code for these shapes alone, compiled before it is timed."""
    torch.compiler.reset()  # a function keeps no more than eight shapes
    run = torch.compile(getattr(block, case.op), dynamic=False)
    run(*case.args)
    return Rival("torch.compile", lambda: run(*case.args))


def _attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Rival:
    if len(segments) == 1 and segments[0].rows is None:
        k, v = segments[0][:2]
        return Rival("transformers sdpa", lambda: sdpa(q, k, v, scale))

    sides = [[(s, s.k) for s in segments], [(s, s.v) for s in segments]]

    def chosen() -> Tensor:
        keys, values = (torch.cat([_taken(x, s.rows, segments) for s, x in side], 2) for side in sides)
        return sdpa(q, keys, values, scale)

    return Rival("gather + sdpa", chosen)


def _taken(x: Tensor, rows: Tensor | None, segments: Sequence[Segment]) -> Tensor:
    """[B G|H K D], as many heads for every segment."""
    heads = max(x.shape[1] if s.rows is None else s.rows.shape[1] for s in segments)
    if rows is None:
        return x.repeat_interleave(heads // x.shape[1], 1)
    return gathered(x, rows.reshape(*x.shape[:2], -1)).view(*rows.shape, -1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int) -> Rival:
    places = torch.arange(first, first + q.shape[2], device=q.device).unsqueeze(1)
    behind = places - torch.arange(k.shape[2], device=k.device)
    seen = (behind >= 0) & (behind < window)
    return Rival("sdpa with a mask", lambda: scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True))


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))


def scattered(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    return x.scatter_(2, rows.unsqueeze(-1).expand(values.shape), values)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """-> [B T H D]"""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    out: Tensor = sdpa_attention_forward(groups, q, k, v, None, scaling=scale)[0]
    return out


def eager(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """-> [B T H D], weights [B H T S]"""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    new, stored = q.shape[2], k.shape[2]
    mask = torch.full((1, 1, new, stored), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    groups: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    return eager_attention_forward(groups, q, k, v, mask.triu(stored - new + 1), scaling=scale)


def _without_faiss(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return "faiss runs on the CPU"
    try:
        import faiss
    except ImportError:
        return "faiss is not installed"
    faiss.omp_set_num_threads(torch.get_num_threads())
    return None


def faiss_kmeans(x: Tensor, initial: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """One problem after the other, as `kernels.ops.kmeans` with no tolerance: centroids [N C d], codes [N P]."""
    import faiss

    found = []
    for points in x.numpy():
        engine = faiss.Kmeans(
            x.shape[2], len(initial), niter=iterations, min_points_per_centroid=1, max_points_per_centroid=x.shape[1]
        )
        engine.train(points, init_centroids=points[initial.numpy()])
        found.append((torch.from_numpy(engine.centroids), torch.from_numpy(engine.assign(points)[1])))
    centroids, codes = (torch.stack(parts) for parts in zip(*found, strict=True))
    return centroids, codes


class FaissSearch:
    """An index for each KV head over the keys that codes [1 G S m] stand for."""

    def __init__(self, centroids: Tensor, codes: Tensor) -> None:
        import faiss

        _, groups, parts, clusters, width = centroids.shape
        self.indices = []
        for group in range(groups):
            index = faiss.IndexPQ(parts * width, parts, (clusters - 1).bit_length(), faiss.METRIC_INNER_PRODUCT)
            own = centroids[0, group].float()
            faiss.copy_array_to_vector(own.flatten().numpy(), index.pq.centroids)
            index.is_trained = True
            keys = torch.cat([own[part][codes[0, group, :, part].long()] for part in range(parts)], -1)
            index.add(keys.numpy())
            self.indices.append(index)

    def best(self, q: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
        """Scores of all keys, of which faiss hands out the best only. q [1 H 1 D] -> scores, rows [1 G g count]"""
        queries = q[0].float().view(len(self.indices), -1, q.shape[3]).numpy()
        found = [index.search(query, count) for index, query in zip(self.indices, queries, strict=True)]
        scores, rows = (torch.stack([torch.from_numpy(one[side]) for one in found])[None] for side in (0, 1))
        return scores, rows


def _by_faiss(x: Tensor, prepared: Callable[[], Call]) -> Rival:
    """`prepared`: makes the call, with whatever faiss does once."""
    reason = _without_faiss(x)
    return Rival(reason, None) if reason else Rival("faiss", prepared())


_RIVALS: dict[str, Callable[..., Rival]] = {
    "segment_attention": _attention,
    "prefill_attention": lambda *args: Rival("transformers sdpa", lambda: sdpa(*args)),
    "prefill_attention_with_column_sums": lambda *args: Rival("transformers eager", lambda: eager(*args)[1].sum(2)),
    "column_sums": lambda q, k, scale: Rival("transformers eager", lambda: eager(q, k, k, scale)[1].sum(2)),
    "windowed_attention": _windowed,
    "gather_rows": lambda x, rows: Rival("torch.gather", lambda: gathered(x, rows)),
    "put_rows": lambda x, rows, values: Rival("torch.scatter_", lambda: scattered(x, rows, values)),
    "kmeans": lambda x, initial, iterations, _: _by_faiss(x, lambda: partial(faiss_kmeans, x, initial, iterations)),
    "pq_weights": lambda q, centroids, codes, _: _by_faiss(q, lambda: partial(FaissSearch(centroids, codes).best, q)),
}
