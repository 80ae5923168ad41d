"""`make gpu-check` and `gpu-measure` on a bare machine, with torch, triton, transformers and pytest alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, PropertyMock

import pytest

from harness.bench import suite
from tests import on_a_gpu
from tests.instruction_sets import FEW

ROOT = Path(__file__).parents[1]
# what the project asks for beside those and what they bring
ABSENT = (
    "accelerate", "datasets", "faiss", "flash_attn", "gguf", "hydra", "hypothesis", "jieba", "math_verify",
    "matplotlib", "omegaconf", "pandas", "pyarrow", "pytest_randomly", "pytest_timeout", "rapidfuzz", "rouge",
    "rouge_score", "scipy", "wandb", "wonderwords", "xdist",
)  # fmt: skip
LIMITS = {"read_gb_s": 9.0, "matmul_gflop_s": {"fp32": 9.0, "bf16": 9.0}}
MAKE = (ROOT / "Makefile").read_text()


def variable(name: str) -> list[str]:
    """The words of a make variable."""
    found = re.search(rf"^{name} *=((?:\\\n|.)*)", MAKE, re.MULTILINE)
    assert found is not None
    return found.group(1).replace("\\\n", " ").split()


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_and_run_without_the_rest() -> None:
    """Without a device nearly all of them are skipped, but their modules are imported whole."""
    few = ["-m", "gpu and not slow", "-k", "not kmeans or empty_cluster"]  # k-means is interpreted here, slowly
    words = [*variable("GPU_TESTS"), *few, "-v", "-p", "tests.on_a_gpu"]
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import pytest; sys.exit(pytest.main({words}))"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": "", "KV_HARNESS_TEST_SEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=inherited | bare)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inputs drawn from seed 7" in done.stdout
    names = set(re.findall(r"/(test_\w+)\.py::", done.stdout))
    assert {"test_gpu", "test_ops", "test_block", "test_kmeans", "test_graph_gpu", "test_host_gpu"} <= names


def test_a_test_that_breaks_the_device_ends_its_process_and_none_begins_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded, ended = on_a_gpu.Bounded(99.0), list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(on_a_gpu, "A_WORKER", True)
    for error in (ValueError("CUDA out of memory"), RuntimeError("CUDA error: an illegal memory access")):
        bounded.pytest_runtest_makereport(MagicMock(), MagicMock(excinfo=MagicMock(value=error)))
        bounded.pytest_runtest_logfinish()
    assert ended == [1]
    monkeypatch.setenv(on_a_gpu.UNTIL, "0")
    with pytest.raises(pytest.skip.Exception, match=on_a_gpu.LEFT_OUT):
        bounded.pytest_runtest_setup()


def test_the_files_that_lists_of_tests_name_are_there() -> None:
    named = [word.partition("::")[0] for word in (*variable("GPU_TESTS"), *FEW) if word.startswith("tests/")]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_suite_names_benchmarks_and_goes_on_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = suite.parser().parse_args(["--device", "cpu", "--out", str(tmp_path)])
    for _, words in suite.plan(options).values():  # each says what it would do
        module = __import__(f"harness.bench.{words[0]}", fromlist=["_"])
        module.parser().parse_args(words[1:])
    assert sum(share for share, _ in suite.plan(options).values()) == pytest.approx(1)
    process = MagicMock()
    type(process).exitcode = PropertyMock(side_effect=[1, 1, 0])
    monkeypatch.setattr(suite, "get_context", lambda kind: MagicMock(Process=lambda **_: process))
    suite.main(options)
    said = capsys.readouterr()
    assert (process.start.call_count, process.kill.call_count) == (2, 1)
    assert "ended with code 1; another goes on" in said.err
    assert "CUT OFF, in part or in whole: methods-long, codec-int4" in said.out
    assert (tmp_path / "summary.txt").read_text() in said.out
    options.shape = "tiny"
    with pytest.raises(SystemExit, match="another device, shape or plan"):
        suite.main(options)


@pytest.mark.slow
def test_every_benchmark_runs_without_the_rest(tmp_path: Path) -> None:
    sizes = ["--tokens", "200", "--rounds", "1", "--out", str(tmp_path)]
    tiny = ["--shape", "tiny", "--new", "4"]
    commands = [
        ["decode", *sizes, *tiny, "--budget", "100", "--dtype", "fp32", "--batch", "1", "2", "--methods", "pqcache"],
        ["layer", *sizes, "--budget", "100", "--methods", "pqcache"],
        ["ops", *sizes, "--budget", "100", "--prefill", "40", "--ops", "top_k"],
        ["profile", *sizes, *tiny, "--budget", "100", "--dtype", "fp32", "--methods", "pqcache"],
        ["generate", *sizes, *tiny, "--dtypes", "fp32"],
    ]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        "from harness.bench import __main__ as bench\nfrom harness.bench.common import limits\n"
        f"limits.measured = lambda device: {LIMITS}\n"
        f"sys.exit(max(bench.main(words) for words in {commands}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "plot.png").exists()
