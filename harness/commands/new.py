"""`python -m harness.new method NAME --kind selects`: a method of your own to begin with.

It writes mine/NAME.py and conf/method/NAME.yaml into the working directory, and nothing over a file that is there; NAME
may bring its package, as in ideas.NAME. The kinds: `evicts` keeps a part of the prompt, once, at the seal; `selects`
reads a choice of it in every step, with budgets per layer; `merges` lets rows go while the answer grows, and merges
them into rows that stay.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path

from harness.config.catalogue import CONF, ConfigError, entries
from harness.config.errors import as_command
from harness.results.files import write_atomically
from harness.terminal.arguments import Parser
from harness.terminal.notices import say

TEMPLATES = CONF.parent / "methods" / "templates"
KINDS = {"evicts": "lag", "selects": "taper", "merges": "fold"}  # kind -> its template


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("new", __doc__)
    parser.add_argument("what", metavar="method", choices=["method"], help="what to write")
    parser.add_argument("name", metavar="NAME", help="of the method, in small letters")
    parser.add_argument("--kind", choices=KINDS, default="evicts", help="default: %(default)s")
    options = parser.parse_args(arguments)
    package, _, name = options.name.rpartition(".")
    files = written(options.kind, name, package or "mine")
    for path in files:
        if path.exists():
            raise ConfigError(f"{path} is there already: choose another name, or move it away.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        say(f"wrote {path}")
    say(f"check it: PYTHONPATH=. python -m harness.check --config-dir conf method={name}")
    say(f"run it:   PYTHONPATH=. python -m harness --config-dir conf method={name} budget=0.2")


def written(kind: str, name: str, package: str) -> dict[Path, str]:
    """Return the files of a new method, by their paths. Raise `ConfigError` for a name that no
    module can have, or that is taken."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a method: write small letters, digits and _, as in my_method."
        )
    if not all(part.isidentifier() and not iskeyword(part) for part in package.split(".")):
        raise ConfigError(f"{package!r} cannot name a package: write names with points between.")
    if name in entries("method"):
        raise ConfigError(f"{name} is a method of the harness: choose another name.")
    template = KINDS[kind]
    sources = {
        suffix: (TEMPLATES / f"{template}{suffix}").read_text("utf-8")
        for suffix in (".py", ".yaml")
    }
    own = "".join(part.title() for part in name.split("_"))
    if iskeyword(own) or (
        name != template and re.search(rf"\b{own}(Keep|Read)?\b", sources[".py"])
    ):
        raise ConfigError(
            f"{name} would be the class {own}, which is taken in such a file: choose another name."
        )

    def renamed(text: str) -> str:
        text = text.replace(f"methods.templates.{template}", f"{package}.{name}")
        return re.sub(rf"\b{template.title()}(?=(Keep|Read)?\b)", own, text)

    module = Path(*package.split("."), f"{name}.py")
    preset = Path("conf", "method", f"{name}.yaml")
    return {module: renamed(sources[".py"]), preset: renamed(sources[".yaml"])}


if __name__ == "__main__":
    sys.exit(main())
