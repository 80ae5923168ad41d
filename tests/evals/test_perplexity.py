"""WikiText-2: windows that cover the text once, and the score of a likelihood."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from evals.base import TaskEnv, TaskError
from evals.data import Content
from evals.perplexity import WikiText2, _text
from tests.evals.counting import Bytes


def task(**changes: Any) -> WikiText2:
    return WikiText2(**{"window": 20, "scored": 8, "stride": 8, "samples": None, "revision": "main", **changes})


def env(root: Path, window: int | None = None, *, strips: bool = False) -> TaskEnv:
    return TaskEnv(text=Bytes(strips=strips), seed=0, data_root=root, window=window)


@pytest.mark.parametrize("strips", [False, True])
def test_every_token_behind_the_first_context_is_scored_once(tmp_path: Path, strips: bool) -> None:
    text = "plain words, then café, 日本語 and 𝔘𝔫𝔦 — to the end of the text"
    (tmp_path / "ppl").mkdir()
    (tmp_path / "ppl" / "wikitext2_test_raw.txt").write_text(text, encoding="utf-8")
    examples = list(task().examples(env(tmp_path, strips=strips)))
    scored = "".join(example.references[0] for example in examples)
    assert text.startswith(text[:12] + scored)
    assert len(text.encode()) - len((text[:12] + scored).encode()) < 8
    for output in ("Yes.", "nan", "-1", "inf"):
        with pytest.raises(TaskError, match=f"{examples[0].id}: output '{output}' is no mean negative log-likelihood"):
            task().score(examples[0], output)
    for example in examples:
        assert example.context + example.references[0] in text
        assert (example.chat, example.teacher_forced) == (False, True)
    assert len(list(task(samples=2).examples(env(tmp_path)))) == 2
    with pytest.raises(TaskError, match="choose a smaller window"):
        list(task(window=500).examples(env(tmp_path)))
    with pytest.raises(TaskError, match="exceeds the model's 16 tokens"):
        list(task().examples(env(tmp_path, window=16)))


def test_the_hubs_rows_make_the_raw_file(shared_data: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    raw = (shared_data / "ppl" / "wikitext2_test_raw.txt").read_bytes()
    lines = raw.decode().splitlines(keepends=True)
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": [line if line.strip() else "" for line in lines]}), sink)
    rebuilt = _text(Content(sink.getvalue().to_pybytes(), "hub:x.parquet", ""))
    assert hashlib.sha256(rebuilt.encode()).digest() == hashlib.sha256(raw).digest()
