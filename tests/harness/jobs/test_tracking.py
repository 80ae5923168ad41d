"""What is sent to Weights & Biases, with the real client kept offline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.settings import SettingsError
from harness.jobs.tracking import mode_now, numbers, publish
from harness.terminal.notices import say_once


def test_a_summary_becomes_flat_numbers() -> None:
    summary = {"score": {"mean": 0.5, "ci95": [0.1, 0.9]}, "full": None, "method": "pqcache", "simulated": False}
    assert dict(numbers(summary)) == {"score.mean": 0.5, "method": "pqcache", "simulated": False}


def test_one_wandb_run_per_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: dict[str, Any] = {}
    run = SimpleNamespace(summary={}, finish=lambda: calls.update(finished=True))
    fake = SimpleNamespace(init=lambda **arguments: (calls.update(arguments), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "niah-pqcache-1234"
    publish("kv", folder, {"budget": 0.2}, {"score": {"mean": 1.0}})
    assert (calls["project"], calls["id"], calls["resume"]) == ("kv", "niah-pqcache-1234", "allow")
    assert calls["config"] == {"budget": 0.2}
    assert run.summary == {"score.mean": 1.0}
    assert calls["finished"]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who never heard of wandb's environment."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("harness.jobs.tracking.find_spec", lambda name: object())
    monkeypatch.setattr("harness.jobs.tracking.reachable", lambda server: True)
    say_once.cache_clear()


@pytest.mark.usefixtures("online")
def test_what_is_missing_is_said_and_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mode_now() == "offline"
    assert "there is no login (`wandb login` or WANDB_API_KEY)" in capsys.readouterr().err
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert mode_now() is None
    monkeypatch.setattr("harness.jobs.tracking.reachable", lambda server: False)
    assert mode_now() == "offline"
    assert "https://api.wandb.ai cannot be reached" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode_now() is None
    monkeypatch.setattr("harness.jobs.tracking.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="pip install wandb"):
        mode_now()


@pytest.mark.usefixtures("online")
def test_a_client_that_fails_costs_no_run(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def refuse(**arguments: Any) -> None:
        modes.append(arguments["mode"])
        raise RuntimeError("403")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    code, out, err = cli("method=full", "results.wandb=kv", "task.depths=1")
    assert code == 0, err
    assert "Traceback" not in err
    assert modes == ["offline"]
    assert err.index("there is no login") < err.index("was not sent to Weights & Biases: RuntimeError: 403")
    assert "full" in out
