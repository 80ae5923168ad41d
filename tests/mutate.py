"""Inject faults of one line and see whether the tests find them: `python tests/mutate.py [--against CHECKOUT]`.

Faults are drawn from functions whose code (docstrings aside) is the same as at the commit BASE, so that the tests of
that commit can be asked about the survivors. They are applied in a scratch worktree of HEAD, never in the checkout.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

BASE = "6d01b6f8"
ROOMS = ("methods/*.py", "kernels/*.py", "evals/**/*.py", "harness/engine/**/*.py")
SOURCE = ("harness", "methods", "kernels", "evals")
ALWAYS = ("tests/methods/test_contract.py", "tests/test_stored_tokens.py")
FILES, SECONDS = 12, 120  # test files that a fault runs besides ALWAYS, the nearest first; CPU time that all have
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*"}
SWAPS |= {"//": "/", "%": "*", "+=": "-=", "and": "or", "or": "and", "not": " ", "is": "is not", "in": "not in"}
SWAPS |= {"True": "False", "False": "True", "min": "max", "max": "min", "any": "all", "all": "any"}


class Fault(NamedTuple):
    """Say what stands for the characters from `start` to `stop` of a line."""

    file: Path
    function: tuple[str, str]  # its qualified name and its code
    number: int  # within the function
    line: int
    start: int
    stop: int
    text: str


def git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, check=True).stdout


def functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods, but none within another, with their qualified names and without docstrings."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass(lineno=0, end_lineno=0)]
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield inner.name if inner is node else f"{node.name}.{inner.name}", inner


def faults(root: Path, known: Container[tuple[str, str]]) -> Iterator[Fault]:
    """Yield the faults of all functions that are among `known`: other operators and constants, dropped statements."""
    for file in (path.relative_to(root) for room in ROOMS for path in sorted(root.glob(room))):
        tokens = list(tokenize.tokenize(io.BytesIO((root / file).read_bytes()).readline))
        for name, node in functions(root / file):
            if (function := (name, ast.dump(node))) in known:
                yield from (Fault(file, function, number, *place) for number, place in enumerate(places(node, tokens)))


def places(function: ast.FunctionDef, tokens: list[tokenize.TokenInfo]) -> Iterator[tuple[int, int, int, str]]:
    lines = set(range(function.body[0].lineno, function.end_lineno + 1))
    for node in (inner for statement in function.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Raise | ast.Assert):  # messages
            lines -= set(range(node.lineno, node.end_lineno + 1))
        stores = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if (stores or isinstance(node, ast.Expr | ast.AugAssign)) and node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset, "pass"
    for token in (token for token in tokens if token.start[0] in lines):
        if token.type == tokenize.NUMBER or token.string in SWAPS:
            text = SWAPS.get(token.string) or str(ast.literal_eval(token.string) + 1)
            yield token.start[0], token.start[1], token.end[1], text


def tests_of(root: Path, module: Path) -> list[str]:
    """Return the tests that import a module, or import something that does, the nearest first, and ALWAYS."""
    imports = {}
    for file in (path for room in (*SOURCE, "tests") for path in sorted((root / room).rglob("*.py"))):
        names = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {base[:-1], *(base + alias.name for alias in node.names)}
        imports[file.relative_to(root)] = {name.replace(".", "/") for name in names}
    reached, chosen = {module}, list[Path]()
    for _ in range(2):
        wanted = {str(path.parent if path.stem == "__init__" else path.with_suffix("")) for path in reached}
        reached |= {file for file, places in imports.items() if places & wanted}
        chosen += sorted(file for file in reached if file.name.startswith("test_") and file not in chosen)
    return list(dict.fromkeys([*map(str, chosen[:FILES]), *ALWAYS]))


@contextmanager
def worktree(checkout: Path, commit: str = "HEAD") -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=checkout.resolve().parent, prefix="mutants-") as folder:
        git(checkout, "worktree", "add", "--detach", f"{folder}/tree", commit)
        try:
            yield Path(folder, "tree")
        finally:
            git(checkout, "worktree", "remove", "--force", f"{folder}/tree")


def failure(root: Path, tests: list[str]) -> str:
    """Run tests and return the first that fails or hangs, "timeout" if they take longer, or "" if they pass."""
    options = "-x -q -n 0 -p no:randomly -p no:cacheprovider --timeout=60".split()
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (SECONDS, SECONDS))
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, preexec_fn=limit)
    if run.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout.decode(), re.MULTILINE)
    return (failed or ["a crash"])[0] if run.returncode else ""


def outcome(root: Path, fault: Fault) -> str:
    """Apply a fault, run the tests of its module, take it back, and print what happened."""
    path = root / fault.file
    whole = path.read_text(encoding="utf-8")
    lines = whole.splitlines(keepends=True)
    line = lines[fault.line - 1]
    lines[fault.line - 1] = faulty = line[: fault.start] + fault.text + line[fault.stop :]
    with suppress(SyntaxError):
        if ast.dump(ast.parse("".join(lines))) != ast.dump(ast.parse(whole)):
            path.write_text("".join(lines), encoding="utf-8")
            killer = failure(root, tests_of(root, fault.file))
            path.write_text(whole, encoding="utf-8")
            result = f"killed by {killer}" if killer not in ("", "timeout") else killer or "survived"
            if "::" in killer and failure(root, [killer]) == killer:
                result = f"undecided, as {killer} fails without the fault too"
            print(f"{fault.file}:{fault.line}: {line.strip()}  ->  {faulty.strip()}  {result}", flush=True)
            return result
    return ""  # no program, or the same one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th fault from number I on, to use N cores")
    parser.add_argument("--seed", help="eight hex digits; default: of the last commit that changed source or tests")
    parser.add_argument("--against", type=Path, help="a checkout whose tests the survivors run against")
    options = parser.parse_args()
    checkout = Path(__file__).resolve().parents[1]
    seed = options.seed or git(checkout, "log", "-1", "--format=%H", "--", *SOURCE, "tests", "conf").decode()[:8]
    counts = Counter[str]()
    with worktree(checkout, BASE) as base, worktree(checkout) as here, worktree(options.against or checkout) as there:
        old = (path for room in SOURCE for path in sorted((base / room).rglob("*.py")))
        known = {(name, ast.dump(node)) for path in old for name, node in functions(path)}
        pool, twins = list(faults(here, known)), {fault[1:3]: fault for fault in faults(there, known)}
        print(f"seed {seed}: of {len(pool)} faults in functions that are as at {BASE}", flush=True)
        random.Random(int(seed, 16)).shuffle(pool)
        part, parts = map(int, options.part.split("/"))
        for fault in pool[part::parts]:
            if result := outcome(here, fault):
                counts[result.partition(" ")[0].strip(",")] += 1
                if result == "survived" and options.against:
                    print("  there: ", end="")
                    outcome(there, twins[fault[1:3]]) if fault[1:3] in twins else print("no such function")
                if counts.total() == options.count:
                    break
    print(", ".join(f"{count} {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
