"""A hundred wrong inputs as ten users type them, and what makes an answer to one good. `python -m tests.wrong_inputs`
prints every answer and counts the good ones; tests/harness/test_wrong_inputs.py holds them.

Good is one sentence that names what was typed and says what to do, an exit code other than 0, nothing that is ignored,
no traceback, and no file left behind.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fast import MODEL_ARGS, PQ, STREAMING, TASK_ARGS, niah, run
from tests.forks import Forked, module

TINY = " ".join(MODEL_ARGS)
SMALL = " ".join([*MODEL_ARGS, *TASK_ARGS])
# command -> what its one sentence has to say: the key, and what to do. {names} are files of `Files`
COMMANDS: dict[str, tuple[str, ...]] = {
    # someone who has read half of the README
    "{small} method=PQCache": ("PQCache", "did you mean pqcache?"),
    "{small} --budget=0.2": ("--budget", "budget=0.2"),
    "{small} --method full": ("--method", "method=full"),
    "{small} method = full": ("'method'", "key=value"),
    "{small} method=full method.budget=0.2": ("method has no parameter budget", "budget=VALUE"),
    "{small} budget=true": ("budget=true", "a number"),
    "{small} device=gpu": ("device=gpu", "cuda"),
    "{small} dtype=float32": ("dtype=float32", "fp32"),
    "reprot {run}": ("reprot", "report"),
    "run {small}": ("'run'", "key=value"),
    # who writes tasks on the command line
    "{tiny} task.lengths=[-5]": ("task.lengths", "-5"),
    "{tiny} task.lengths=[400] task.depths=[150]": ("task.depths", "150", "100"),
    "{tiny} task.lengths=[400] task.max_new_tokens=0": ("task.max_new_tokens", "at least 1"),
    "{tiny} task.lengths=[400] task.template=hello": ("task.template", "{{context}}"),
    "{tiny} task=ruler task.tasks=[vtt]": ("task.tasks", "vtt", "vt"),
    "{tiny} task=ruler task.tasks=[vt] task.source={text}": ("task.source", "text.txt"),
    "{tiny} task=multiturn task.source={wrong_json}": ("task.source", "wrong.json"),
    "{tiny} task=multiturn task.turns=0": ("task.turns=0", "at least 1"),
    "{tiny} task=gsm8k task.prompt=mine": ("task.prompt", "lm_eval"),
    "{tiny} task=scbench task.tasks=nope": ("task.tasks", "nope"),
    "{tiny} task=longbench task.datasets=[qaspr]": ("task.datasets", "qasper"),
    "{tiny} task=wikitext2 task.scored=5000": ("task.scored=5000", "task.window=2048"),
    # who tunes methods by hand
    "{small} method=quest method.page_size=0": ("method.page_size=0", "at least 1"),
    "{small} method=snapkv method.kernel=4": ("method.kernel=4", "odd"),
    "{small} method=snapkv method.pooling=median": ("method.pooling", "median", "avg"),
    "{small} method=shadowkv method.rank=0": ("method.rank=0",),
    "{small} method=streaming method.positions=true": ("method.positions=true", "text"),
    "{small} method=pqcache method.sinks=1.5": ("method.sinks=1.5", "whole number"),
    # who is after speed
    "{small} threads=0": ("threads=0", "at least 1"),
    "{small} trace=yes": ("trace", "on"),
    "{small} memory_check=maybe": ("memory_check=maybe", "off"),
    "{small} codec=int4g7": ("codec=int4g7",),
    "{small} placement=disk disk={text}": ("disk=", "text.txt", "folder"),
    "{small} placement=disk disk=/proc": ("disk=/proc", "name another folder"),
    "{small} budget_bytes=1e3": ("budget_bytes=1e3", "8GB"),
    # who keeps conversations
    "{tiny} task=multiturn history=disk": ("history=disk", "store"),
    "{tiny} task=multiturn history=store store.disk=1GB store.folder={text}": ("store.folder", "text.txt"),
    "{tiny} task=multiturn history=store store.host=8XB": ("store.host=8XB", "8GB"),
    "{tiny} task=multiturn overflow.by=truncate_cache": ("overflow.by", "overflow.window"),
    "{tiny} task=multiturn overflow.window=1000 overflow.ratio=1.5": ("overflow.ratio=1.5", "below 1"),
    "{tiny} task=multiturn overflow.window=512 overflow.sinks=300": ("overflow.sinks=300", "overflow.window=512"),
    # who sweeps on a cluster
    "-m {small} budget=0.1,0.2 hydra/launcher=joblib hydra.launcher.n_jobs=abc": ("hydra.launcher.n_jobs=abc",),
    "-m {small} budget=0.1,0.2 hydra/launcher=joblib hydra.launcher.njobs=2": ("hydra.launcher.njobs", "n_jobs"),
    "-m {small} budget=0.1,0.2 hydra/sweeper=optuna": ("hydra/sweeper=optuna",),
    "{small} hydra.nope=1": ("hydra.nope",),
    "{small} hydra.run.dir=x": ("hydra.run.dir=x", "leave it out"),
    "-m {small} method=glob(zzz*)": ("method=glob(zzz*)",),
    "-m {small} seed=1,two": ("seed=two", "whole number"),
    "{small} results.root={text}": ("results.root=", "text.txt"),
    "{small} data.root={text}": ("data.root=", "text.txt", "folder"),
    "{small} results.root=~nobody-here/runs": ("results.root=~nobody-here/runs", "write the path out"),
    "{small} wandb.entity=us": ("wandb.entity", "set wandb.project"),
    "{small} --config-dir {text}": ("--config-dir", "text.txt", "folder"),
    # who brings models
    "{small} model.tokenizer_name=gpt2": ("model.tokenizer_name", "bytes"),
    "model=hf model.name={empty}": ("model.name", "config.json"),
    "model=hf model.name={broken_model}": ("config.json",),
    "model=hf model.name={empty} model.window=-5": ("model.window=-5", "at least 1"),
    # who reads results
    "report": ("DIR",),
    "report {empty}": ("empty", "results.root"),
    "report {text}": ("text.txt", "folder"),
    "report {run} --sort=accuracy": ("--sort", "accuracy", "score"),
    "report {run} --csv={empty}": ("empty", "name another file"),
    "report {run} --html={text}": ("--html", "text.txt", "folder"),
    "show {run} --id=nope": ("--id", "nope"),
    "show {runs}": ("runs", "folder"),
    "show {run} --diff={empty}": ("empty",),
    "status {runs} --watch": ("--watch",),
    "rescore {run} --data-root={text}": ("--data-root", "text.txt"),
    "list methods": ("methods", "method"),
    "list method=pqcache nonsense=1": ("nonsense=1",),
    "list --verbose": ("--verbose",),
    "doctor --fix": ("--fix",),
    "lint {small} --show=-3": ("--show", "-3"),
    # who serves, simulates, tunes, measures
    "serve {tiny} slots=0": ("slots=0", "at least 1"),
    "serve {tiny} replay={text}": ("replay", "text.txt"),
    "serve {tiny} --limit=fast": ("--limit fast", "p90=2s"),
    "serve {tiny} --costs={text}": ("--costs", "text.txt"),
    "serve {tiny} --out={text} task.conversations=1 task.turns=1 task.longest=400": ("--out", "text.txt"),
    "simulate sessions=0": ("sessions=0", "above 0"),
    "simulate --figure=99": ("--figure", "99", "13"),
    "tune {small} method=full": ("Full", "choose another method"),
    "tune {small} method=streaming method.sinks=4,x": ("method.sinks", "x"),
    "bench layer --methods=pqcash": ("--methods", "pqcash", "pqcache"),
    "observe key_spectra {small}": ("key_spectra", "key_spectrum"),
}
# who calls from Python -> the same of the exception
PYTHON: dict[str, tuple[str, ...]] = {
    "attach(PQCache(), budget=1.5)": ("budget=1.5", "0.2"),
    "attach(Streaming(), budget=0.2, placement='host')": ("placement", "device"),
    "attach(PQCache(), budget=0.5, placement='gpu')": ("placement", "gpu", "host"),
    "attach(PQCache(), budget=0.5, codec='int4')": ("codec", "int4"),
    "attach(PQCache(), budget=0.5, placement='disk', disk='nowhere')": ("disk", "nowhere"),
    "attach(Full()).cache(capacity=0)": ("capacity=0", "1"),
    "attach(Full()).cache(capacity='100')": ("capacity='100'", "whole number"),
    "attach(Full()).cache(capacity=50, batch=0)": ("batch=0", "1"),
    "attach(Streaming(), budget=0.5, reuse_steps=-1)": ("reuse_steps=-1",),
    "attach('llama', method=Full())": ("model",),
    "generate(Full(), None, use_cache=False)": ("use_cache=False",),
    "generate(Full(), dict(capacity=62), num_beams=2)": ("num_beams=1",),
    "generate(Full(), dict(capacity=61), new=3)": ("capacity=61", "62"),
    "PQCache(m=-1)": ("m=-1", "at least 1"),
}
PREAMBLE = """
import torch
from contextlib import ExitStack
from harness.engine.attach import Attachment, attached
from methods.full import Full
from methods.pqcache import PQCache
from methods.streaming import Streaming
from tests.tiny import prompt, tiny
def attach(*words, **more):
    model = () if "method" in more else (tiny("llama"),)
    return ExitStack().enter_context(attached(*model, *words, **more))
def generate(method, room, new=2, **more):
    model, ids = tiny("llama"), prompt(60)
    with attached(model, method) as kv:
        cache = None if room is None else kv.cache(**room)
        model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False, **more)
"""
SIDE_BY_SIDE = 3  # processes
SAID = re.compile(r"(?:python -m [\w. ]+: )?error: (.*)")
BESIDE = ("note: ", "usage: ", " ", "\t")  # lines on stderr that may stand beside the sentence


@dataclass(frozen=True)
class Files:
    """What wrong inputs name, below one folder: finished runs, and files of every wrong kind."""

    folder: Path

    def made(self) -> Files:
        run(self.folder / "runs", PQ, niah(), budget=0.5)
        run(self.folder / "runs", STREAMING, niah(), budget=0.5)
        for name in ("empty", "broken_model"):
            (self.folder / name).mkdir()
        (self.folder / "text.txt").write_text("The quick brown fox: jumps, over\n- the lazy dog\n")
        (self.folder / "wrong.json").write_text('[{"text": 5}]')
        (self.folder / "broken_model" / "config.json").write_text('{"model_type": ')
        return self

    def words(self, text: str) -> list[str]:
        """A command with its {names} filled in."""
        first = next((self.folder / "runs").glob("niah-pqcache*"))
        places = {"run": first, "runs": first.parent, "text": self.folder / "text.txt"}
        places |= {name: self.folder / name for name in ("empty", "broken_model")}
        places |= {"wrong_json": self.folder / "wrong.json"}
        return shlex.split(text.format(tiny=TINY, small=SMALL, **places))


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str
    left: tuple[str, ...]  # files and folders that were not there before

    def faults(self, says: Sequence[str]) -> Iterator[str]:
        """Why it is not good, in words; none where it is."""
        lines = self.err.splitlines()
        sentences = [found[1] for line in lines if (found := SAID.fullmatch(line))]
        others = [line for line in lines if line and not SAID.fullmatch(line) and not line.startswith(BESIDE)]
        if self.code not in (1, 2):
            yield f"exit code {self.code}"
        if "Traceback" in self.err + self.out:
            yield "a traceback"
        if len(sentences) != 1:
            yield f"{len(sentences)} sentences"
        if others:
            yield f"more on stderr: {others[0]}"
        if lacking := [word for word in says if word.replace("{{", "{").replace("}}", "}") not in " ".join(sentences)]:
            yield f"does not say {', '.join(lacking)}"
        if self.left:
            yield f"leaves {', '.join(self.left)}"


class Asked:
    """A wrong input in a process of its own, in an empty folder."""

    def __init__(self, text: str, files: Files) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wrong-")
        self._files, self._before = files, _names(files.folder)
        for name in ("here", "tmp"):
            (Path(self._folder.name) / name).mkdir()
        if text in PYTHON:
            self._process = Forked(_python, text, str(self._tmp), cwd=self._here)
        else:
            self._process = Forked(_command, files.words(text), str(self._tmp), cwd=self._here)

    @property
    def _here(self) -> Path:
        return Path(self._folder.name) / "here"

    @property
    def _tmp(self) -> Path:
        return Path(self._folder.name) / "tmp"

    def answer(self) -> Answer:
        code = self._process.wait()
        left = _names(self._here) | _names(self._tmp) | (_names(self._files.folder) - self._before)
        answer = Answer(code, self._process.out, self._process.err, tuple(sorted(left)))
        self._folder.cleanup()
        return answer


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".lock"}


def _command(words: list[str], tmp: str) -> None:
    _settle(tmp)
    module("harness", *words)


def _python(text: str, tmp: str) -> None:
    _settle(tmp)
    names: dict[str, object] = {}
    exec(PREAMBLE, names)
    try:
        exec(text, names)
    except (ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _settle(tmp: str) -> None:
    """Nothing outside `tmp` for temporary files, and no network."""
    os.environ.update(TMPDIR=tmp, HF_HUB_OFFLINE="1")
    tempfile.tempdir = tmp
    warnings.filterwarnings("ignore", "'harness.__main__' found in sys.modules")  # of runpy, in a fork alone


def main(chosen: Sequence[str]) -> int:
    """Prints all answers, or those to inputs in which one of the words stands."""
    good = 0
    known = [(text, says) for text, says in [*COMMANDS.items(), *PYTHON.items()] if _is_meant(text, chosen)]
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder)).made()
        asked = [Asked(text, files) for text, _ in known[:SIDE_BY_SIDE]]
        for number, (text, says) in enumerate(known, 1):
            answer = asked.pop(0).answer()
            asked += [Asked(text, files) for text, _ in known[number + len(asked) :][:1]]
            faults = list(answer.faults(says))
            good += not faults
            print(f"\n{number} {'good' if not faults else 'BAD: ' + '; '.join(faults)}\n$ {text}\n{answer.err.strip()}")
    print(f"\n{good} of {len(known)} good")
    return int(good < len(known))


def _is_meant(text: str, chosen: Sequence[str]) -> bool:
    return not chosen or any(word in text for word in chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
