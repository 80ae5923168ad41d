"""`make test-gpu` on a bare GPU machine: torch, triton, transformers and pytest are all that is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
def test_tests_for_a_gpu_are_collected_and_run_without_the_rest(tmp_path: Path) -> None:
    """Without a device nearly all of them are skipped, but their modules are imported whole."""
    few = ["-m", "gpu and not slow", "-k", "not kmeans or empty_cluster"]  # k-means is interpreted here, slowly
    words = [*variable("GPU_TESTS"), *few, f"--junitxml={tmp_path / 'test-gpu.xml'}"]
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import pytest; sys.exit(pytest.main({words}))"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": "", "KV_HARNESS_TEST_SEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=inherited | bare)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inputs drawn from seed 7" in done.stdout
    cases = list(ElementTree.parse(tmp_path / "test-gpu.xml").iter("testcase"))
    names = {str(case.get("classname")).rpartition(".")[2] for case in cases}
    assert {"test_gpu", "test_ops", "test_block", "test_kmeans", "test_graph_gpu", "test_host_gpu"} <= names


def test_the_files_that_lists_of_tests_name_are_there() -> None:
    named = [word.partition("::")[0] for word in (*variable("GPU_TESTS"), *FEW) if word.startswith("tests/")]
    assert [name for name in named if not (ROOT / name).exists()] == []


def dry(target: str, *settings: str) -> str:
    make = ["make", "-n", target, "GPU_PYTHON=python", *settings]
    return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_benchmarks_are_bounded_in_time_and_files() -> None:
    targets = re.findall(r"^((?:bench|profile)-gpu[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    commands = [dry(target, "OUT=elsewhere").replace("\\\n", " ") for target in targets]
    lines = [line for command in commands for line in command.splitlines() if "harness.bench" in line]
    folders = [re.search(r"--out (elsewhere/gpu-\w+)", line) for line in lines]
    assert len({folder and folder.group(1) for folder in folders}) == len(lines) == len(targets) == 7
    assert all(line.startswith("timeout 300 ") and "--minutes 4" in line for line in lines)
    assert all("--no-plot" in line or " profile " in line for line in lines)
    for line in lines:  # each says what it would do
        module = line.partition("harness.bench ")[2].split()[0]
        words = line.partition(f"harness.bench {module} ")[2].split()
        parser = __import__(f"harness.bench.{module}", fromlist=["_"]).parser()
        words[words.index("--device") + 1] = "cpu"
        parser.parse_args(words)


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
