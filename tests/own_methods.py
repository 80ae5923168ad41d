"""The methods, and their presets, that tests run over."""

from __future__ import annotations

from harness.config.catalogue import Entry, entries


def own_methods() -> list[Entry]:
    """Every method and preset of ours but the tuned ones, which were found for heads and prompts of another size than
    those of tests. Methods that another library brings have tests of their own, and so has DSA, which few models let
    run."""
    own = [entry for entry in entries("method").values() if not entry.bridged and entry.name != "dsa"]
    return [entry for entry in own if not entry.name.endswith("_tuned")]
