"""Without network and with an empty cache, every task of conf/task gives examples or one sentence that says how."""

from __future__ import annotations

import socket
from itertools import islice
from pathlib import Path

import pytest

from evals.base import Example, MissingData, Task, TaskEnv
from harness.config import plugins
from harness.config.catalogue import CONF, entries
from tests.evals.counting import CountedText

# lm-eval's data are its own affair, and rows are the user's
TASKS = [name for name in entries("task") if name not in ("lm_eval", "rows")]
COMMANDS = {  # where the hub's file must go so that it is found
    "longbench_v2": r"zai-org/LongBench-v2 data.json .* --local-dir DATA/LongBench-v2",
    "math": r"HuggingFaceH4/MATH-500 test.jsonl .* --local-dir DATA/MATH-500",
    "mrcr": r"openai/mrcr 2needle/2needle_0\.parquet .* --local-dir DATA/mrcr",
}
BUILT_IN = {"multiturn", "niah", "niah_pqcache", "niah_shadowkv", "overflow"}  # their text comes with Python


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1 with an empty cache; any connection is a failure."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was tried: {arguments[1:]}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def first_examples(name: str, root: Path | None) -> list[Example]:
    entry = entries("task", (CONF,))[name]
    values = {key: value for key, value, _ in entry.parameters()}
    task: Task = plugins.build({"_target_": entry.target} | values, "task")
    env = TaskEnv(text=CountedText(), seed=42, data_root=root)
    return list(islice(task.examples(env), 3))


@pytest.mark.parametrize("with_root", [False, True], ids=["no folder", "empty folder"])
@pytest.mark.parametrize("name", TASKS)
def test_missing_data_are_said_in_a_line_with_a_command(name: str, with_root: bool, tmp_path: Path) -> None:
    root = tmp_path if with_root else None
    if name in BUILT_IN:
        assert first_examples(name, root)
        return
    says = COMMANDS.get(name, r"hf download .* --local-dir DATA/\w+|put the file at DATA/")
    with pytest.raises(MissingData, match=says) as missing:
        first_examples(name, root)
    assert "\n" not in str(missing.value)
