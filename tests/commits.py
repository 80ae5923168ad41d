"""Checks what commits say about themselves: `python -m tests.commits [SINCE]`.

A subject has at most 72 characters. A commit that changes more than ten files has a body, which says why. If a test's
name goes away, one of the commits says what stands for it: `Removes-tests: test_a, test_b -> replaced by test_c`.

The commits are those after SINCE; without it, after the merge base with origin/main or main; on main itself the last
one, with all that it merges. A shallow clone may lack the base: then nothing is checked."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

CHARACTERS, FILES = 72, 10
REMOVED = re.compile(r"^Removes-tests:([\w\s,]+)-> *\S", re.MULTILINE)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def base() -> str:
    """Return the commit after which the checks start."""
    head = git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        with suppress(subprocess.CalledProcessError):
            if (common := git("merge-base", head, branch)) != head:
                return common
    return git("rev-parse", "--verify", "HEAD^")


def tests(commit: str, files: str) -> Counter[str]:
    """Count the functions of these files, one per line, whose names are those of tests."""
    trees = [ast.parse(git("show", f"{commit}:{file}")) for file in files.splitlines()]
    named = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return Counter(name for name in named if name.startswith("test_"))


def unexplained(old: str, new: str) -> set[str]:
    """Return the tests of `old` that are gone in `new` and that no commit in between names."""
    change = ("diff", "--no-renames", "--name-only", old, new)
    before = tests(old, git(*change, "--diff-filter=a", "--", "tests/*.py"))
    after = tests(new, git(*change, "--diff-filter=d", "--", "tests/*.py"))
    named = REMOVED.findall(git("log", "--format=%B", f"{old}..{new}"))
    return set(before - after) - set(re.findall(r"\w+", " ".join(named)))


def complaints(since: str) -> Iterator[str]:
    for commit in git("rev-list", "--reverse", f"{since}..HEAD").split():
        subject, _, body = git("show", "-s", "--format=%B", commit).partition("\n")
        changed = len(git("diff-tree", "-r", "-M", "--no-commit-id", "--name-only", commit).splitlines())
        if len(subject) > CHARACTERS:
            yield f"{commit[:8]}: the subject has {len(subject)} characters: use at most {CHARACTERS}."
        if changed > FILES and not body.strip():
            yield f"{commit[:8]}: it changes {changed} files without a reason: say why in its body."
    # A merge is held against each of its parents, or it could drop the work of one of them.
    merges = [line.split() for line in git("rev-list", "--merges", "--parents", f"{since}..HEAD").splitlines()]
    pairs = [(parent, merge) for merge, *parents in merges for parent in parents]
    for old, new in dict.fromkeys([(git("rev-parse", since), git("rev-parse", "HEAD")), *pairs]):
        if gone := unexplained(old, new):
            names = ", ".join(sorted(gone))
            line = f"Removes-tests: {names} -> replaced by ..."
            yield f"{old[:8]}..{new[:8]}: tests are gone: restore them, or write in the body of a commit\n{line}"


def main() -> None:
    try:
        since = sys.argv[1] if sys.argv[1:] else base()
    except (subprocess.CalledProcessError, FileNotFoundError):
        print("commits are not checked: this checkout has no earlier commit to compare with")
    else:
        sys.exit("\n".join(complaints(since)) or None)


if __name__ == "__main__":
    main()
