"""The tests of equal tokens under other sets of instructions: as near as one CPU comes to being another.

`python -m tests.instruction_sets` (`make test-cpus`) runs them under each of `SETTINGS`, or under those that are named,
as in `python -m tests.instruction_sets "MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default"`; `--few` takes the stored
tokens and the contract of every method. MKL heeds MKL_ENABLE_INSTRUCTIONS on Intel alone, and
KV_HARNESS_MARCH is for the C++ kernels: on a CPU that does not heed a setting, its tests repeat the first ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TOKENS = ("-m", "tokens and not slow")
CPU = ("-m", "not slow", "-k", "tokens or cpu or compiled")  # the kernels in C++ as well
BF16 = ("-m", "not slow", "-k", "bf16 or bfloat16")  # names, parameters and marks
FEW = "tests/test_stored_tokens.py", "tests/methods/test_contract.py"
SETTINGS = {  # the variables of a setting, and the tests that run under it
    "": TOKENS,
    "MKL_ENABLE_INSTRUCTIONS=AVX2": TOKENS,
    "MKL_CBWR=COMPATIBLE": TOKENS,
    "ATEN_CPU_CAPABILITY=avx2": TOKENS,
    "ATEN_CPU_CAPABILITY=default": TOKENS,
    "KV_HARNESS_MARCH=x86-64-v3": CPU,
    "ONEDNN_MAX_CPU_ISA=AVX2": BF16,
}


def environment(setting: str) -> dict[str, str]:
    """This process's, with the variables of one setting and of no other."""
    ours = {word.partition("=")[0] for words in SETTINGS for word in words.split()}
    rest = {name: value for name, value in os.environ.items() if name not in ours}
    return rest | dict(word.split("=", 1) for word in setting.split())


def ran(setting: str, *which: str) -> tuple[int, list[str]]:
    """Run the tests that the words `which` choose; return how many passed and the names of those that failed."""
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
    return len(cases) - skipped - len(names), names


def main(settings: list[str]) -> int:
    few = FEW if "--few" in settings else ()
    wrong = 0
    for setting in [word for word in settings if word != "--few"] or SETTINGS:
        passed, failed = ran(setting, *SETTINGS.get(setting, TOKENS), *few)
        told = f"{setting or 'as it is':<30} {passed} passed, {len(failed)} failed"
        print(told, *failed, sep="\n    ", flush=True)
        wrong += len(failed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
