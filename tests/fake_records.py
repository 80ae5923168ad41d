"""Records without a model, for tests of everything behind the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.reports.compare import Comparison, comparisons
from harness.results.files import plain, read_json
from harness.results.records import Record, Reply, made, whole
from harness.results.run_folder import INFO, Run, find, load, write_info


def record(name: str = "a", /, **changes: Any) -> Record:
    """One plain record of 100 prompt tokens; `token_s` gets as many tokens as it has times, unless both are given. Keys
    are those of a line."""
    times = changes.get("token_s", [1.0, 1.5, 1.6, 1.7])
    plain: dict[str, Any] = {
        "id": name, "group": "g", "prompt_sha256": f"hash of {name}", "prompt_tokens": 100, "context_tokens": None,
        "output": "word " * len(times), "tokens": list(range(len(times))), "stop": "eos", "score": 1.0, "details": {},
        "token_s": times, "seal_s": 0.1, "question_s": None, "attended_prompt": 100.0, "attended_total": 102.0,
        "union_prompt": None, "kv_device_bytes": 1000, "kv_host_bytes": 0, "device_peak_bytes": None,
        "host_peak_bytes": 5000, "moved_bytes_per_step": 0.0, "sealed": True, "fallback": None, "warnings": [],
        "fidelity": None, "trace": None, "data": {}, "prompt_ids": None,
    }  # fmt: skip
    return made(Record, plain | changes)


def turn(**changes: Any) -> Reply:
    """Of a conversation; as `record`, but with 10 prompt tokens."""
    return made(Reply, json.loads(record(**{"prompt_tokens": 10} | changes).to_json()))


def talk(name: str, *turns: Reply) -> Record:
    """A conversation."""
    return record(name, **whole(turns))


def records(scores: Sequence[float], prefix: str = "e", **changes: Any) -> list[Record]:
    """One record per score; tokens differ with the score, so that equal outputs are equal scores."""
    return [
        record(f"{prefix}{i}", score=score, **({"tokens": [i, 1, 2, int(100 * score)]} | changes))
        for i, score in enumerate(scores)
    ]


def config(method: str = "full", /, **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "method": {"_target_": f"methods.{method}.{method.title()}"},
        "task": {"_target_": "evals.niah.Niah", "lengths": [1024]}, "model": {"name": "tiny", "revision": None},
        "budget": None if method == "full" else 0.1, "protocol": "prompt", "placement": "device", "dtype": "float32",
        "device": "cpu", "batch": 1, "seed": 0,
    }  # fmt: skip
    return plain | changes


def write_run(
    root: Path, lines: Iterable[Record], method: str = "full", status: str = "complete", /, **changes: Any
) -> Path:
    """A run folder as the harness leaves it. `changes` go into the config, `facts` of them into run.json."""
    facts = {"task_info": {"metric": "recall", "version": "1", "chance": 0.0}} | changes.pop("facts", {})
    settings = config(method, **changes)
    run = Run.open(root, settings, {"config": settings, "sources": "abc"}, "niah", method)
    run.note(**facts)
    for line in lines:
        run.append(line)
    run.close(status)
    return run.folder


def table_of(root: Path) -> Comparison:
    """The one table of all runs below a folder."""
    [table] = comparisons([load(folder) for folder in find([root])])
    return table


def rewrite(folder: Path, config: Mapping[str, Any] | None = None, /, **facts: Any) -> None:
    """Changes the configuration of a stored run and what its run.json says, as if it had been written like that."""
    info = read_json(folder / INFO) | facts
    if config is not None:
        info["config"] = plain(config)
    write_info(folder, info)


def write_failed(root: Path, lines: Iterable[Record], error: Exception) -> Path:
    """A run of PQCache that ended with `error`."""
    settings = config("pqcache")
    run = Run.open(root, settings, {"config": settings}, "niah", "pqcache")
    for line in lines:
        run.append(line)
    run.fail(error)
    return run.folder
