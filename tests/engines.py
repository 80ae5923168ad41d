"""Hold real servers against our engine: `make test-engines`.

Sets up an environment of its own for each server below FOLDER (once), serves the embedded model in fp32, and asks that
its answers at temperature 0 are those of our Full on the same prompts. Prints how long each part takes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from site import getsitepackages
from typing import Any

import torch

from harness.models.embedded import SmolLM2

ROOT = Path(__file__).parents[1]
TASK = ["task=niah", "task.lengths=[300,600]", "task.depths=3", "task.max_new_tokens=32"]
# what an environment needs beside ours, the command that serves, and the parameters of the model that is asked
SERVERS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "transformers": (
        ["fastapi", "uvicorn", "openai"],
        [
            "-m", "transformers.cli.transformers", "serve", "MODEL",
            "--device", "cpu", "--dtype", "float32", "--port", "PORT",
        ],
        ["model.prompts=text"],
    ),
}  # fmt: skip


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


def environment(folder: Path, packages: list[str]) -> Path:
    """Return the Python of an environment that has these packages and all of ours, which stay as they are."""
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        venv.create(folder, with_pip=True)
        [own] = folder.glob("lib/python*/site-packages")
        (own / "ours.pth").write_text("\n".join(getsitepackages()))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "ready").touch()
    return python


def checkpoint(folder: Path) -> Path:
    """Return a folder with the embedded model in fp32, in the layout of the hub."""
    if not (folder / "tokenizer.json").is_file():
        source = SmolLM2()
        source.build(torch.float32, "cpu").save_pretrained(folder)
        source.tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def serving(python: Path, command: list[str], log: Path) -> Iterator[str]:
    """Run a server until the block ends, and yield its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(port) if word == "PORT" else word for word in command]
    with log.open("w") as out, subprocess.Popen([python, *words], stdout=out, stderr=out) as process:
        try:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None:
                    sys.exit(f"the server ended: see {log}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def asked(words: list[str], results: Path) -> dict[str, dict[str, Any]]:
    """Run a task, and return the lines of its answers by the prompt's hash."""
    command = [sys.executable, "-m", "harness", *TASK, *words, f"results.root={results}"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    [folder] = [file.parent for file in results.glob("*/examples.jsonl")]
    lines = map(json.loads, (folder / "examples.jsonl").read_text().splitlines())
    return {line["prompt_sha256"]: line for line in lines if "output" in line}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model, results = checkpoint(folder / "smollm2"), folder / "runs" / time.strftime("%Y-%m-%dT%H-%M-%S")
    with timed("our Full"):
        ours = asked(["method=full", "model=hf", f"model.name={model}", "dtype=fp32"], results / "full")
    for name, (packages, command, words) in SERVERS.items():
        with timed(f"{name}: its environment"):
            python = environment(folder / name, packages)
        with timed(f"{name}: serving"):
            words = [*words, "model=endpoint", f"model.name={model}", f"model.engine={name}", "model.notes=float32"]
            serve = [str(model) if word == "MODEL" else word for word in command]
            with serving(python, serve, folder / f"{name}.log") as url:
                theirs = asked([*words, f"model.url={url}"], results / name)
        differing = [line["id"] for sha, line in ours.items() if theirs[sha]["output"] != line["output"]]
        print(f"{name}: {len(ours) - len(differing)} of {len(ours)} answers are ours; others: {differing}")
        if differing:
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".engines").resolve())
