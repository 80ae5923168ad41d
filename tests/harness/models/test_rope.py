"""`model.rope`: a model rotates as transformers lets it with the same config, and its window follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import Engine, attached
from harness.commands import report
from harness.models.base import ModelError
from harness.models.embedded import SmolLM2
from methods.full import Full
from tests.harness.engine.test_hf import generated
from tests.harness.models.test_models import edit, local, needs_wheel
from tests.harness.test_wrong_input import Cli
from tests.tape import Tape
from tests.tiny import fresh, prompt
from tests.tiny import saved as saved_in

LENGTH = 64  # tokens for which the models here were trained
PAIRS = 8
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn in detail": YARN | {"beta_fast": 16, "truncate": False, "attention_factor": 1.25},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * PAIRS, "long_factor": [3.0] * PAIRS,
    },
}  # fmt: skip
WINDOWS = {"yarn": 256, "yarn in detail": 256, "linear": 160, "dynamic": 128, "llama3": 256, "longrope": 256}
each_rope = pytest.mark.parametrize("name", ROPES)
Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    def save(architecture: str = "llama", **config: Any) -> Path:
        model = fresh(architecture, max_position_embeddings=LENGTH, **config)
        return Path(saved_in(model, tmp_path / architecture).name)

    return save


def theirs(folder: Path, rope: dict[str, Any]) -> Any:
    """The model as transformers loads it with these `rope_parameters` in its config.json."""
    edit(folder / "config.json", rope_parameters=rope)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@each_rope
def test_logits_are_transformers_own(name: str, saved: Saved) -> None:
    folder, rope, ids = saved(), ROPES[name], prompt(LENGTH + 40)
    plain = local(folder).load("fp32", "cpu").model(ids).logits
    ours = local(folder, rope=rope).load("fp32", "cpu").model(ids).logits
    assert not torch.allclose(ours, plain, atol=0.01)
    assert torch.equal(ours, theirs(folder, {"rope_theta": 10000.0} | rope)(ids).logits)


@pytest.mark.parametrize("architecture", ["gemma3_text", "glm", "phi4", "gpt_oss"])
def test_what_the_rotation_has_besides_stays(architecture: str, saved: Saved) -> None:
    """The part of each head, layers that slide, and what a model says itself of the same rotation."""
    rope = ROPES["longrope"] if architecture == "phi4" else YARN
    own = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 20.0, "beta_slow": 2.0}
    own |= {"original_max_position_embeddings": LENGTH // 2}
    folder = saved(architecture, **({"rope_parameters": own} if architecture == "gpt_oss" else {}))
    stated = json.loads((folder / "config.json").read_text())["rope_parameters"]
    if architecture == "gemma3_text":
        merged = stated | {"full_attention": stated["full_attention"] | rope}
    elif architecture == "phi4":
        rope = rope | {key: rope[key][: PAIRS - 2] for key in ("short_factor", "long_factor")}
        edit(folder / "config.json", original_max_position_embeddings=LENGTH)
        merged = stated | rope
    else:
        merged = stated | rope
    source, ids = local(folder, rope=rope), prompt(LENGTH + 40)
    assert source.describe().window == (2 if architecture == "gpt_oss" else 4) * LENGTH
    ours = source.load("fp32", "cpu").model
    assert torch.equal(ours(ids).logits, theirs(folder, merged)(ids).logits)
    with attached(ours, Full()) as kv:
        tokens = Engine(kv).generate(ids, max_new_tokens=16).tokens
    assert tokens == generated(ours, ids)


@each_rope
def test_the_window_is_the_factor_times_the_original_length(name: str, saved: Saved) -> None:
    folder, rope = saved(), ROPES[name]
    info = local(folder, rope=rope).describe()
    assert info.limit == info.window == info.trained_window == WINDOWS[name]
    assert local(folder, rope=rope).load("fp32", "cpu").window == WINDOWS[name]
    shorter, longer = (local(folder, rope=rope, window=WINDOWS[name] + more).describe() for more in (-1, 1))
    assert info.caution is shorter.caution is None
    assert longer.caution == (
        f"model.window={WINDOWS[name] + 1} goes beyond the {WINDOWS[name]} tokens to which model.rope stretches it"
    )


@pytest.mark.parametrize(
    ("stated", "given", "window"),
    [
        ({}, {"original_max_position_embeddings": 48}, 192),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}, 128),
    ],
)
def test_the_original_length_is_that_before_any_stretching(
    stated: dict[str, Any], given: dict[str, Any], window: int, saved: Saved
) -> None:
    own = {"rope_type": "default", "rope_theta": 10000.0}
    own |= stated | ({"original_max_position_embeddings": LENGTH // 2} if stated else {})
    source = local(saved(rope_parameters=own), rope=YARN | given)
    assert source.describe().window == window
    wanted = {"rope_theta": 10000.0, **YARN, "original_max_position_embeddings": window // 4}
    assert source.config().rope_parameters == wanted


def test_a_run_is_told_apart_by_its_rotation(saved: Saved) -> None:
    folder = saved()
    sources = [local(folder), *(local(folder, rope=rope) for rope in ROPES.values()), local(folder, rope=YARN)]
    revisions = [source.identity().revision for source in sources]
    assert len(set(revisions)) == len(ROPES) + 1
    assert revisions[1] == revisions[-1]
    assert all(revision.startswith(revisions[0]) for revision in revisions)
    assert (sources[1], hash(sources[1])) == (sources[-1], hash(sources[-1]))
    assert local(folder, rope=YARN).describe().revision == revisions[1]


@pytest.mark.tokens
def test_captured_steps_take_angles_of_the_whole_window_from_the_table(saved: Saved) -> None:
    model, ids = local(saved(), rope=YARN).load("fp32", "cpu").model, prompt(LENGTH + 40)
    with attached(model, Full()) as kv:
        engine = Engine(kv, graphs=Tape())
        assert engine.generate(ids, max_new_tokens=16).tokens == generated(model, ids)
    assert engine.forward is not None
    assert engine.forward._table is not None
    assert engine.forward._table.shape[1] == 4 * LENGTH


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"factor": 4}, "rope_type=None, which is unknown: choose one of yarn, linear, dynamic, llama3, longrope"),
        ({"rope_type": ["yarn"]}, "which is unknown"),
        ({"rope_type": "yarn"}, "lacks 'factor': rope_type=yarn needs factor, and may have attention_factor"),
        ({"rope_type": "yarn", "factor": "4x"}, "'factor', which should be a number"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor=0.5, which should be at least 1"),
        ({"type": "yarn", "factor": 4}, "has `type`, the old spelling of rope_type"),
        ({"rope_type": "yarn", "factor": 4, "factro": 3}, "has the unknown key factro"),
        (
            {"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 9},
            "has the unknown key original_max",
        ),
        ({"rope_type": "linear", "factor": 2, "original_max_position_embeddings": 9.5}, "a whole number"),
        (ROPES["llama3"] | {"low_freq_factor": 4.0}, "low_freq_factor that is not below"),
        ({"rope_type": "longrope", "factor": 4.0}, "lacks 'short_factor'"),
        ({"rope_type": "yarn", "factor": None}, "lacks 'factor'"),  # null is as good as nothing, for every key
        ({"rope_type": "yarn", "factor": 4, "beta_slow": 40}, "beta_slow that is not below its beta_fast"),
    ],
)
def test_wrong_values_are_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"model.rope={{.*{message}"):
        local("owner/name", rope=rope)


def test_rotations_that_do_not_suit_a_model_are_refused(saved: Saved) -> None:
    with pytest.raises(ModelError, match="longrope alone"):
        local(saved("phi4"), rope=YARN).describe()
    with pytest.raises(ModelError, match=r"8 numbers in short_factor.* rotates 4 pairs"):
        local(saved("glm"), rope=ROPES["longrope"]).describe()


def test_the_command_line_takes_it(cli: Cli, saved: Saved, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["model=hf", f"model.name={saved(vocab_size=300)}", "method=full", "chat=none", "task.depths=1"]
    words += ["task.lengths=[400]", "task.max_new_tokens=4"]
    code, _, err = cli(*words)
    assert (code, "64" in err) == (1, True)  # tokens are all that the model takes
    shown = cli(*words, "model.window=512", "dry_run=true")[1]  # what the run will say
    assert f"caution   model.window=512 goes beyond the {LENGTH} tokens" in shown
    assert f"8 x {LENGTH}" in cli(*words, "model.rope={rope_type: yarn, factor: 8}", "task.lengths=[600]")[2]
    code, out, err = cli(*words, "model.rope={rope_type: yarn, factor: 8}")
    assert (code, "goes beyond" in out + err) == (0, False), err
    (folder,) = (tmp_path / "runs").iterdir()
    run = json.loads((folder / "run.json").read_text())
    assert run["identity"]["model"]["rope"] == {"rope_type": "yarn", "factor": 8}
    assert "+rope-sha256:" in run["identity"]["model_revision"]
    assert run["cautions"] == []
    assert report.main([str(tmp_path / "runs"), "--details"]) == 0
    assert "model: rotated by model.rope={rope_type: yarn, factor: 8}, not by its own" in capfd.readouterr().out


@needs_wheel
@pytest.mark.model
def test_the_embedded_model_takes_it() -> None:
    source = SmolLM2(rope=YARN)
    assert source.describe().window == 4 * 8192
    rotary = source.load("fp32", "cpu").model.model.rotary_emb
    assert (rotary.rope_type, SmolLM2().describe().window) == ("yarn", 8192)
