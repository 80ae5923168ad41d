"""Copies for Weights & Biases: every finished run is sent, and none breaks; the real client is kept offline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.terminal.notices import say_once


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    say_once.cache_clear()
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.slow
def test_the_real_client_keeps_a_run_offline(cli: Callable[..., Any], tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    code, _, err = cli("method=full", "wandb.project=kv", "task.depths=1")
    assert code == 0
    assert "WANDB_API_KEY" in err
    assert "was not sent" not in err
    wandb.teardown()  # its process writes the file
    [written] = tmp_path.rglob("wandb/offline-run-*/*.wandb")
    held = written.read_bytes()
    assert b"methods.full.Full" in held
    assert b"score.mean" in held


@pytest.mark.parametrize("fails", [False, True])
def test_every_run_is_logged_and_a_client_that_fails_costs_none(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    words, logged = ("method=streaming", "budget=0.5", "task.depths=1"), dict[str, dict[str, Any]]()

    def init(**arguments: Any) -> Any:
        assert arguments["mode"] is None
        if fails:
            raise RuntimeError("403")
        assert not any(key.startswith(("results", "wandb")) for key in arguments["config"])
        return nullcontext(SimpleNamespace(log=lambda numbers: logged.update({numbers["method"]: numbers})))

    client = SimpleNamespace(init=init, Settings=SimpleNamespace, login=lambda prompt: True)
    monkeypatch.setitem(sys.modules, "wandb", client)
    assert cli(*words)[0] == 0
    assert not logged
    code, out, err = cli(*words, "wandb.project=kv")
    assert code == 0, err
    assert "reused" in err  # a copy is no part of an identity
    assert "streaming" in out
    assert err.count("RuntimeError: 403") == fails
    assert fails or {method: type(numbers["score.mean"]) for method, numbers in logged.items()} == {
        "full": float,
        "streaming": float,
    }
