"""Hold real servers against our engine: `make test-engines`.

Sets up an environment of its own below FOLDER for each kind of server (once), asks all of them what our Full is asked,
and prints one report. Ends with an error unless, at temperature 0, `transformers serve` answers as our Full does, and
llama.cpp, killed at ten random moments, as it does undisturbed. Says how many answers are the same with four requests
in flight. Each engine computes with one thread."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from site import getsitepackages
from threading import Thread
from urllib.request import urlopen

import torch

from harness.commands.run import Command
from harness.models.embedded import SmolLM2, find_gguf

ROOT = Path(__file__).parents[1]
TASKS = {
    "niah": ["task=niah", "task.lengths=[256,384]", "task.depths=3"],
    "ruler": ["task=ruler", "task.tasks=[niah_multikey_1]", "task.lengths=[512]", "task.samples=5"],
}
OURS = ["method=full", "model=hf", "dtype=fp32"]
CACHES = ("f16", "q8_0", "q4_0")
KILLS, SEED = 10, 0
# what each kind of server needs in its environment, and its command there
PACKAGES = {"transformers": ["fastapi", "uvicorn", "openai"], "llama.cpp": ["xllamacpp==2026.10.11549"]}
TRANSFORMERS = ["-m", "transformers.cli.transformers", "serve", "--device", "cpu", "--dtype", "float32"]


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)


def environment(folder: Path, engine: str) -> Path:
    """Return the Python of an environment that has what a server needs and all of ours, which stays as it is."""
    python = folder / engine / "bin" / "python"
    if not (folder / engine / "ready").is_file():
        with timed(f"the environment of {engine}"):
            venv.create(folder / engine, with_pip=True)
            [own] = (folder / engine).glob("lib/python*/site-packages")
            (own / "ours.pth").write_text("\n".join(getsitepackages()))
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[engine]], check=True)
            (folder / engine / "ready").touch()
    return python


class Server:
    """A server, in a process of its own, that has the same address each time it is started."""

    def __init__(self, log: Path, *command: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.at = free.getsockname()
        self.log, self.command = log, [str(self.at[1]) if word == "PORT" else str(word) for word in command]

    def __enter__(self) -> Server:
        with self.log.open("a") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, cwd=ROOT)
        while self.process.poll() is None:
            with suppress(OSError), urlopen("http://{}:{}/health".format(*self.at), timeout=5):
                return self
            time.sleep(0.2)
        sys.exit(f"the server ended: see {self.log}")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def words(self, engine: str, model: str, prompts: str, notes: str) -> list[str]:
        """How it is asked."""
        given = {"name": model, "engine": engine, "prompts": prompts, "notes": f'"{notes}"'}
        url = "model.url=http://{}:{}/v1".format(*self.at)
        return ["model=endpoint", url, *(f"model.{key}={value}" for key, value in given.items())]


def run(folder: Path, task: str, *words: str) -> bool:
    """Run a task, or what is left of it, and say whether it came to its end."""
    command = Command([*TASKS[task], *words, "likelihood=off", f"results.root={folder}"])
    command.run()
    return not command.failed


def answers(folder: Path) -> dict[str, str]:
    """What was answered to each prompt."""
    lines = [json.loads(line) for file in folder.glob("*/examples.jsonl") for line in file.open()]
    return {line["prompt_sha256"]: line["output"] for line in lines if "output" in line}


def asked(folder: Path, *words: str, tasks: Sequence[str] = tuple(TASKS)) -> dict[str, str]:
    with timed(folder.name):
        if not all([run(folder / task, task, *words) for task in tasks]):
            sys.exit(1)
    return {prompt: answer for task in tasks for prompt, answer in answers(folder / task).items()}


def killing(server: Server, span: float, folder: Path, *words: str) -> dict[str, str]:
    """Run needles, kill the server at random moments within about `span` seconds, and start it again at once. Repeat
    the command when it gives up. Return what was answered at the end."""
    draw, killed = random.Random(SEED), list[float]()

    def kill() -> None:
        while not any(folder.glob("niah-*/examples.jsonl")):
            time.sleep(0.2)
        while len(killed) < KILLS:
            killed.append(draw.uniform(0, span / KILLS))
            time.sleep(killed[-1])
            server.__exit__()
            server.__enter__()

    Thread(target=kill, daemon=True).start()
    while not run(folder, "niah", *words):
        print("the command gave up, and is repeated", flush=True)
    if len(killed) < KILLS:
        sys.exit(f"the task ended after {len(killed)} kills: ask for more")
    return answers(folder)


def same(what: str, answers: dict[str, str], others: dict[str, str]) -> bool:
    equal = sum(others.get(prompt) == answer for prompt, answer in answers.items())
    print(f"{what}: {equal} of {len(answers)} answers are the same", flush=True)
    return equal == len(answers)


def main(folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    runs = folder / "runs" / time.strftime("%Y-%m-%dT%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    if not (model := folder / "smollm2").exists():
        model.symlink_to(SmolLM2().folder(weights=True))
    model = os.path.relpath(model, ROOT)

    @contextmanager
    def llama(cache: str, slots: int = 1) -> Iterator[tuple[Server, list[str]]]:
        python, script = environment(folder, "llama.cpp"), ROOT / "tests" / "llama_server.py"
        log = folder / "llama.cpp.log"
        with Server(log, python, script, find_gguf(), "PORT", model, cache, slots) as server:
            yield server, server.words("llama.cpp", model, "ids", f"weights=Q4_1 cache={cache}")

    full = asked(runs / "report" / "full", *OURS, f"model.name={model}")
    python = environment(folder, "transformers")
    with Server(folder / "transformers.log", python, *TRANSFORMERS, model, "--port", "PORT") as server:
        words = server.words("transformers", model, "text", "weights=fp32 cache=fp32")
        theirs = asked(runs / "report" / "transformers", *words)
        good = same("transformers beside our Full", full, theirs)
        four = asked(runs / "transformers with four in flight", *words, "batch=4", tasks=["niah"])
        same("transformers, four in flight beside one", four, theirs)
    for cache in reversed(CACHES):
        with llama(cache) as (_, words):
            began = time.perf_counter()
            theirs = asked(runs / "report" / f"llama.cpp {cache}", *words)
            span = (time.perf_counter() - began) / 4
        same(f"llama.cpp with a cache of {cache} beside our Full", full, theirs)
    report = [sys.executable, "-m", "harness.report", runs / "report", "--details", "--csv", runs / "engines.csv"]
    subprocess.run(report, check=True, cwd=ROOT)
    with llama("f16", 4) as (_, words):
        four = asked(runs / "llama.cpp with four in flight", *words, "batch=4", tasks=["niah"])
    same("llama.cpp, four in flight beside one", four, theirs)
    with timed(f"llama.cpp, killed {KILLS} times"), llama("f16") as (server, words):
        killed = killing(server, span, runs / "killed", *words)
    good &= same(f"llama.cpp, killed {KILLS} times, beside undisturbed", killed, theirs)
    sys.exit(not good)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".engines").resolve())
