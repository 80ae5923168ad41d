"""The pages of docs, and conf/config.yaml, that are written from the entries of settings, from conf/ and from the cards
of methods: `python -m tests.generated_pages`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import yaml

from harness.config.catalogue import Entry, Experiment, entries, experiments
from harness.config.keys import Setting, parameters_of, sections, settings
from harness.config.settings import Settings
from kernels import ops
from methods.abilities import APART
from tests.official.comparison import HEAD, stored


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Return Markdown that shows `text` as it is, including backticks."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


DOCS = Path(__file__).parents[1] / "docs"
CONFIG = DOCS.parent / "conf" / "config.yaml"
COMMAND = "python -m tests.generated_pages"
WIDTH = 128  # characters of a line of docs
COMMANDS = {
    "list": "lists methods, tasks, models and experiments; with a name, shows its card",
    "status": "says how far the runs of [sweeps](experiments.md#sweeps) are",
    "report": "puts finished runs side by side: table, [page](results.md#reports), Markdown, LaTeX, CSV, "
    "[figures](results.md#figures-for-a-paper)",
    "show": "shows outputs, or two runs side by side where they differ",
    "rescore": "applies today's scorers to [stored outputs](results.md#scoring-again)",
    "check": "holds a method of your own to [its contract](extending.md#check-it), in seconds",
    "check_numbers": "runs ten prompts of a published row here, and says whether "
    "[its numbers](results.md#a-published-row-again) come out",
    "new": "writes [a method to begin with](extending.md#three-to-begin-with)",
    "tune": "searches a method's own parameters [at equal budget](experiments.md#tuning-a-method)",
    "serve": "lets conversations [arrive, queue and share steps](conversations.md#serving)",
    "simulate": "sends 52,000 turns through [CachedAttention's tiers](conversations.md#the-simulator)",
    "observe": "measures what papers [observe](experiments.md#observations) of keys and attention weights",
    "bench": "measures [operations, layers, steps and generations](benchmarks.md)",
    "lm_eval": "is [lm-evaluation-harness](loops.md#lm-evaluation-harness)'s own command, with any method as its model",
    "doctor": "looks at versions, memory, disk and kernels; `--model` runs a needle with a known answer",
}
COMPARED = ("prefill", "rule", "unit", "group_rule", "dense_layers", "sinks", "window")  # columns of the table
NONE = ("none", "nothing", "not used")  # facts that have no row
SETTINGS_TITLE = f"""# Commands and settings

Written by `{COMMAND}`: change harness/config/settings.py and the comments in conf/, not this page.

## Commands

Run a command as `python -m harness NAME` or `kv-harness NAME`; `--help` says more. Without a name, it runs a method on
a task, with Full for comparison. `eval "$(kv-harness -sc install=bash)"` gives tab completion.

{table(("command", "what it does"), [(code(f"harness.{name}"), text) for name, text in COMMANDS.items()])}

## Keys

Every key of `python -m harness`, with its default. Set one with `key=value`; with `-m`, separate the values of a sweep
by commas. `python -m harness --help` prints the same list. The parameters of a method stand on [its card](methods.md).

By default a run uses the GPU, if there is one, in the checkpoint's dtype, or else the CPU in fp32, with as many threads
as `OMP_NUM_THREADS` says. A setting that would change nothing is refused, or a note says so. A run that cannot fit into
memory is refused before anything loads, and the error names the setting that helps."""
METHODS_TITLE = f"""# The methods

What must be known before two of them are compared, with the defaults of conf/method/. Written by
`{COMMAND}`; change the comments in a method's yaml, its card among them, not this page.

The rows "as in released code" say what its authors' code does alike, and
[how that is measured](comparison.md#held-against-released-code). A method whose card has no row "budget", "index cost"
or "deviations" has none of it."""
OPERATIONS_HEAD = ("backends, in the order in which they are tried", "operations")
PAIRS_HEAD = ("ability", "does not go with")
EXPERIMENTS_HEAD = ("experiment", "what", "made by", "small variant")


def config_yaml() -> str:
    """Return conf/config.yaml with today's settings between its head and its end, which are Hydra's."""
    head, _, rest = CONFIG.read_text(encoding="utf-8").partition("\n\n")
    parts = [head]
    for title, rows in groupby(settings(), key=lambda row: row.section):
        parts.append("\n".join([f"# {title}", *map(_yaml_line, rows)]))
    return "\n\n".join(parts) + "\n\nhydra:" + rest.partition("\nhydra:")[2]


def _yaml_line(row: Setting) -> str:
    group, _, name = row.key.rpartition(".")
    value = row.default
    if isinstance(attrgetter(row.key)(Settings()), str) and yaml.safe_load(value) != value:
        value = f'"{value}"'  # on and off are truth values in YAML
    line = f"{'  ' * bool(group)}{name}: {value}".rstrip()
    return f"{line:<19}  # {row.meaning}" if row.meaning else line


def settings_page() -> str:
    """Return docs/settings.md: the keys by section, and the parameters of tasks and models."""
    parts = [SETTINGS_TITLE]
    for title, rows in sections():
        lines = [(code(row.given), row.values, row.meaning) for row in rows]
        parts += [f"### {title}", table(("key", "values", "meaning"), lines)]
    for group in ("task", "model"):  # those of methods are on their cards
        lines = [row for entry in entries(group).values() for row in _parameter_rows(group, entry)]
        parts += [f"## Parameters of a {group}", table((code(f"{group}="), "parameter", "meaning"), lines)]
    return "\n\n".join(parts) + "\n"


def _parameter_rows(group: str, entry: Entry) -> Iterator[tuple[str, str, str]]:
    """Of the yaml files for one class the first but presets shows every parameter, others what they change."""
    first = next(other for other in entries(group).values() if other.target == entry.target and other.base is None)
    same = set() if first == entry else {given for given, _ in parameters_of(first)}
    rows = [(given, meaning) for given, meaning in parameters_of(entry) if given not in same]
    for place, (given, meaning) in enumerate(rows or [("", entry.headline)]):
        name = code(entry.name) if place == 0 else ""
        yield name, code(given and f"{group}.{given}"), (entry.base is None and meaning) or entry.headline


def methods_page(methods: Iterable[Entry]) -> str:
    """Return docs/methods.md: one table over all methods, then a section for each, with its presets."""
    presets = {m.name: [one for one in methods if one.base == m] for m in methods}
    full = [m for m in methods if m.base is None]
    return "\n\n".join([METHODS_TITLE, _comparison(full), *(_section(m, presets[m.name]) for m in full)]) + "\n"


def _comparison(methods: Sequence[Entry]) -> str:
    head = [_words(line) for line in ("method", *COMPARED)]
    return table(head, [[f"[{m.name}](#{m.name})", *(m.facts().get(line, "") for line in COMPARED)] for m in methods])


def _section(entry: Entry, presets: Sequence[Entry]) -> str:
    given = {name: text for name, text in entry.facts().items() if name not in COMPARED and text not in NONE}
    places = ((place, given.pop(f"on_{place}", "")) for place in ("device", "host"))
    held = "; ".join(f"on {place}: {text}" for place, text in places if text)
    facts = [("name", given.pop("name")), ("held", held), *((_words(name), text) for name, text in given.items())]
    parameters = [(code(given), meaning) for given, meaning in parameters_of(entry)]
    changed = [(code(f"method={preset.name}"), preset.headline) for preset in presets]
    released = [_beside_released(row) for row in stored() if row["method"] == entry.name]
    rows = [*facts, *parameters, *changed, *released]
    return "\n\n".join([f"## {entry.name}", _filled(entry.card()), table((code(f"method={entry.name}"), ""), rows)])


def _filled(card: str) -> str:
    """Return a docstring with its paragraphs wrapped as the lines of docs; lists stay as they are."""
    paragraphs = [
        part if "\n- " in f"\n{part}" else textwrap.fill(part, WIDTH, break_on_hyphens=False)
        for part in card.split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def _beside_released(row: Mapping[str, str]) -> tuple[str, str]:
    setting = f", {code(row['setting'])}" if row["setting"] else ""
    same = f"{row['same']} of {row['of']}; differs by: {row[HEAD[-1]]}"
    return f"as in released code: {row['compared']}{setting}", same


def _words(name: str) -> str:
    return name.replace("_", " ")


def experiments_table(found: Mapping[str, Experiment]) -> str:
    """Return the table of docs/experiments.md."""
    own = {name: one for name, one in found.items() if not name.startswith("small/")}
    full = [one for name, one in own.items() if not name.endswith(("_floor", "_read", "_times"))]  # text names these
    texts = [one.headline.partition(" model: ")[0] for one in full]
    rows = [
        (code(one.name), text, _short(one.command), _small_cost(one, found))
        for one, text in zip(full, texts, strict=True)
    ]
    return table(EXPERIMENTS_HEAD, rows)


def _short(command: str) -> str:
    return code(" ".join(word for word in command.split()[2:] if not word.startswith(("-", "+"))))


def _small_cost(one: Experiment, found: Mapping[str, Experiment]) -> str:
    if one.name.startswith("tables/"):  # with the embedded model already
        return f"itself: {one.facts.get('cost', '')}"
    small = found.get(f"small/{one.name}")
    return small.facts.get("cost", "") if small else "none"


def operations_table() -> str:
    """Return the table in docs/kernels.md: the operations that have the same backends, in one row."""
    backends = dict.fromkeys(", ".join(op.targets) for op in ops.ALL)
    named = {row: ", ".join(code(op.name) for op in ops.ALL if ", ".join(op.targets) == row) for row in backends}
    return table(OPERATIONS_HEAD, named.items())


def pairs_table() -> str:
    """Return the table in docs/extending.md: which abilities do not go with which, and why."""
    firsts = dict.fromkeys(first for first, _ in APART)
    others = {
        first: "; ".join(f"{code(other.__name__)}: {why}" for (one, other), why in APART.items() if one is first)
        for first in firsts
    }
    return table(PAIRS_HEAD, [(code(first.__name__), text) for first, text in others.items()])


def written_into(name: str) -> tuple[str, str]:
    """Return a page that people write as it is, and with today's table in place of its own."""
    head, today = {
        "experiments": (EXPERIMENTS_HEAD, experiments_table(experiments())),
        "extending": (PAIRS_HEAD, pairs_table()),
        "kernels": (OPERATIONS_HEAD, operations_table()),
    }[name]
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    return page, with_table(page, head, today)


def with_table(page: str, head: Sequence[str], today: str) -> str:
    """Return a page with today's table in place of the one that has this head."""
    before, found, rest = page.partition(table(head, []).splitlines()[0])
    assert found, f"the page has lost the table of {head}"
    return f"{before}{today}\n\n{rest.partition(chr(10) * 2)[2]}"


def main() -> None:
    CONFIG.write_text(config_yaml(), encoding="utf-8")
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")
    (DOCS / "methods.md").write_text(methods_page(entries("method").values()), encoding="utf-8")
    for name in ("experiments", "extending", "kernels"):
        (DOCS / f"{name}.md").write_text(written_into(name)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
