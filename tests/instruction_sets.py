"""The tests of equal tokens under other sets of instructions: as near as one CPU comes to being another.

`python -m tests.instruction_sets` (`make test-cpus`) runs them under each of `SETTINGS`, or under those that are named,
as in `python -m tests.instruction_sets "MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default"`; `--few` takes the stored
tokens and the quick tests that every method goes through. A setting that changes no bit of what `PROBES` compute would
test nothing: it is said to be not tested, and never to have passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor

from kernels import ops
from kernels.dispatch import BackendError, use_backend
from kernels.reference import Segment

ROOT = Path(__file__).parents[1]
TOKENS = ("-m", "tokens and not slow")
BF16 = ("-m", "not slow", "-k", "bf16 or bfloat16")  # names, parameters and marks
FEW = (
    "tests/test_stored_tokens.py",
    "tests/methods/test_contract.py",
    "tests/methods/test_hybrid_models.py",
    "tests/harness/cachedattention/turns/test_caches.py",
    "tests/harness/engine/test_generate.py",
    "tests/harness/engine/test_hf.py",
)
SETTINGS = {  # the variables of a setting, and the tests that run under it
    "": TOKENS,
    "MKL_ENABLE_INSTRUCTIONS=AVX2": TOKENS,
    "MKL_CBWR=COMPATIBLE": TOKENS,
    "ATEN_CPU_CAPABILITY=avx2": TOKENS,
    "ATEN_CPU_CAPABILITY=default": TOKENS,
    "KV_HARNESS_MARCH=x86-64-v3": TOKENS,
    "ONEDNN_MAX_CPU_ISA=AVX2": BF16,
}
HEEDED = {  # why a variable may change nothing
    "MKL_ENABLE_INSTRUCTIONS": "MKL heeds it on Intel alone",
    "KV_HARNESS_MARCH": "it is for the C++ kernels, which need a compiler and an x86 with more than AVX2",
}


class Outcome(NamedTuple):
    """Tests that passed, and the names of those that did not."""

    passed: int
    failed: list[str]


def drawn(*shape: int) -> Tensor:
    """Uniform numbers, the same under every setting (normal ones would not be)."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


def kernels_in_cpp() -> Tensor:
    with use_backend("cpu"):
        read = ops.segment_attention(
            drawn(1, 8, 1, 64), [Segment(drawn(1, 2, 50, 64), drawn(1, 2, 51, 64)[:, :, 1:])], 1
        )
        return torch.cat([read.flatten(), ops.group_weights(drawn(1, 2, 4, 333), 1.0, "sum").flatten()])


PROBES: dict[str, Callable[[], Tensor]] = {
    "product": lambda: drawn(97, 256) @ drawn(256, 211),
    "batched product": lambda: drawn(4, 33, 16) @ drawn(4, 16, 77),
    "softmax": lambda: (8 * drawn(5, 333)).softmax(-1),
    "sum of exponentials": lambda: (8 * drawn(5, 333)).logsumexp(-1),
    "bf16 product": lambda: (drawn(97, 256).bfloat16() @ drawn(256, 211).bfloat16()).float(),
    "C++ kernels": kernels_in_cpp,
}


def bits() -> dict[str, str]:
    """A digest of what each probe computes in this process."""
    torch.set_num_threads(1)
    made = {}
    for name, probe in PROBES.items():
        try:
            made[name] = hashlib.sha256(probe().contiguous().numpy().tobytes()).hexdigest()
        except BackendError as reason:
            made[name] = str(reason)
    return made


def environment(setting: str) -> dict[str, str]:
    """This process's, with the variables of one setting and of no other."""
    ours = {word.partition("=")[0] for words in SETTINGS for word in words.split()}
    rest = {name: value for name, value in os.environ.items() if name not in ours}
    return rest | dict(word.split("=", 1) for word in setting.split())


def probed(setting: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.instruction_sets", "--bits"]
    done = subprocess.run(command, cwd=ROOT, env=environment(setting), capture_output=True, text=True, check=True)
    digests: dict[str, str] = json.loads(done.stdout)
    return digests


def changed(setting: str, plain: dict[str, str]) -> list[str]:
    """The probes that compute other bits under a setting than under none."""
    now = probed(setting)
    return [name for name in PROBES if now[name] != plain[name]]


def ran(setting: str, *which: str) -> Outcome:
    """`which`: words of pytest that choose tests."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-q", "-n", "auto", "--maxprocesses", "8", "--junitxml", str(report), *which]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment(setting), capture_output=True, text=True
        )
        if done.returncode not in (0, 1):  # interrupted, or nothing collected
            ended = f"pytest ended with {done.returncode} under {setting or 'no setting'}"
            sys.exit(f"{ended}:\n{done.stdout[-4000:]}{done.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return Outcome(len(cases) - skipped - len(names), names)


def line(setting: str, told: str) -> str:
    return f"{setting or 'as it is':<30} {told}"


def main(settings: list[str]) -> int:
    if settings == ["--bits"]:
        print(json.dumps(bits()))
        return 0
    few = FEW if "--few" in settings else ()
    wrong, plain = 0, probed("")
    for setting in [word for word in settings if word != "--few"] or SETTINGS:
        others = changed(setting, plain)
        if setting and not others:
            why = HEEDED.get(setting.partition("=")[0], "this CPU or build of torch does not heed it")
            print(line(setting, f"not tested: it changes no bit of any probe here; {why}"), flush=True)
            continue
        passed, failed = ran(setting, *SETTINGS.get(setting, TOKENS), *few)
        touched = f" (other bits: {', '.join(others)})" if others else ""
        print(line(setting, f"{passed} passed, {len(failed)} failed{touched}"), *failed, sep="\n    ", flush=True)
        wrong += len(failed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
