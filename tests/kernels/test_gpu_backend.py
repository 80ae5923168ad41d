"""The Triton backend on machines without a GPU: never chosen by itself, and compiled all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from kernels import ops
from kernels.dispatch import REFERENCE, use_backend
from kernels.reference import Segment
from tests.kernels.op_cases import cases, converted, device_of, random
from tests.quick import mostly_slow

WITH_TRITON = [op for op in ops.ALL if "triton" in op.targets]
ROOT = Path(__file__).parents[2]
EVERY = "90", "bfloat16", "float32"  # every variant; else one of each kernel
ONCE = [(capability, "bfloat16", "once") for capability in ("90", "80", "89", "100", "120")]
UNWANTED = ("narrow global", "narrow shared", "by column")
SMALL_READS = {  # at the shape of an 8B model, and why it does not matter there
    "channels._channels": "the last block of a row, under a mask, and the queries' numbers",
    "coded._attend_codes": "ranges of values, one for each group of channels",
    "coded._decode_rows": "ranges of values, one for each group of channels",
    "encode._encode": "codes that change threads to be packed, once per block",
    "partial._products": "one token",
    "picked._pick": "one query of each head",
    "pq._count_kinds": "a cell's kind is a byte of a table",
    "pq._look_up": "each code's product stands in a table",
    "pq._place_kinds": "a cell's kind is a byte of a table",
    "rope._turn_to": "a few first keys",
    "scores._scores": "a block's end, and its largest score",
    "top_p._estimate": "offset and step of a key",
}


def python(*arguments: str, **environment: str) -> str:
    """Output of a process that does not interpret."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("words", mostly_slow([EVERY, *ONCE], ONCE[0]), ids=" ".join)
def test_every_kernel_compiles(words: tuple[str, ...]) -> None:
    """Triton keeps what it compiled: a kernel that has not changed since is not compiled again."""
    pytest.importorskip("triton")
    printed = python("-m", "tests.kernels.compile_for_gpus", *words)
    kernels, launches = (rows_of(printed, first) for first in ("kernel ", "operation "))
    modules = {row["kernel"].rpartition(".")[0] for row in kernels}
    assert modules == {op.targets["triton"] for op in WITH_TRITON}
    spilling = [row["kernel"] for row in kernels if row["stack"] != "0"]
    assert not spilling or words[0] != "90", "these kernels spill registers"
    for operation, megabytes, count in documented_launches():
        of_this = [row for row in launches if row["operation"] == operation]
        assert [row["MB"] for row in of_this] == [megabytes] * int(count), operation
    if words == EVERY:
        seen = {row["kernel"] for row in launches if any(row[kind] != "0" for kind in UNWANTED)}
        assert seen == {*SMALL_READS}


def documented_launches() -> list[tuple[str, str, str]]:
    """Return each operation in the table of docs/kernels.md with its megabytes and its launches."""
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    lines = text.partition("| operation | MB |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[entry.strip() for entry in line.strip("|").split(" | ")] for line in lines]
    return [(operation.replace("`", ""), megabytes, launches) for operation, megabytes, _, launches in rows]


def rows_of(printed: str, first: str) -> list[dict[str, str]]:
    """Return the lines of the printed table whose head begins with this word."""
    lines = printed[printed.index(f"\n{first}") + 1 :].splitlines()
    head, _, *rows = (re.split("  +", line.strip()) for line in lines)
    return [dict(zip(head, row, strict=True)) for row in takewhile(lambda row: len(row) == len(head), rows)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiler's driver is replaced")
def test_small_reads_of_a_loop_are_found_in_machine_code() -> None:
    pytest.importorskip("triton")
    from tests.kernels.machine_code import column_reads, instructions

    lines = [
        "        /*0000*/                   LDG.E.U16 R1, desc[UR4][R2.64] ;",
        ".L_x_1:",
        "        /*0010*/                   LDG.E.U8 R1, desc[UR4][R2.64] ;",
        "        /*0020*/              @!P4 BRA `(.L_x_1) ;",
        ".L_x_2:",
        "        /*0030*/                   BRA `(.L_x_2);",
        "        /*0040*/                   NOP;",
    ]
    code, looped = instructions(lines)
    assert len(code) == 5
    assert [line.split()[0] for line in looped] == ["LDG.E.U8", "@!P4"]
    layouts = """
#blocked = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [32, 1], warpsPerCTA = [4, 1], order = [0, 1]}>
#blocked1 = #ttg.blocked<{sizePerThread = [8, 1], threadsPerWarp = [16, 2], warpsPerCTA = [1, 4], order = [0, 1]}>
%a = ttg.local_load %b : !ttg.memdesc<32x128xi8, #shared, #smem, mutable> -> tensor<32x128xi8, #blocked> loc(#loc1)
%c = tt.load %d, %e, %f : tensor<128x32x!tt.ptr<bf16>, #blocked1> loc(#loc2)
%g = tt.trans %a {order = array<i32: 1, 0>} : tensor<128x32xi8, #blocked1> -> tensor<32x128xi8, #blocked> loc(#loc3)
"""
    assert column_reads(layouts) == 1


@pytest.mark.parametrize("capabilities", mostly_slow([("90",), ("80", "120")], ("90",)), ids=" ".join)
def test_the_rule_knows_how_many_programs_of_attention_fit(capabilities: tuple[str, ...]) -> None:
    """Into so many pieces tokens are cut, so that all run at once."""
    pytest.importorskip("triton")
    for line in python("-m", "tests.kernels.programs_at_once", *capabilities).splitlines():
        for step in line.split(", ")[1:]:
            name, by_rule, compiled = step.split()
            assert by_rule == compiled, (line, name)


def test_more_query_heads_than_a_program_holds_go_elsewhere() -> None:
    pytest.importorskip("triton")
    with use_backend("triton"), torch.device(device_of("triton")):
        q, k = torch.zeros(1, 65, 1, 16), torch.zeros(1, 1, 9, 16)
        for op, args in (
            (ops.segment_attention, (q, [Segment(k, k)], 1.0)),
            (ops.prefill_attention, (q, k, k, 1.0)),
            (ops.row_scores, (q.transpose(1, 2), k)),
            (ops.channel_sums, (q.transpose(1, 2), k, torch.zeros(1, 1, 16, dtype=torch.int64))),
            (ops.pq_weights, (q, torch.zeros(1, 1, 1, 8, 16), torch.zeros(1, 1, 9, 1, dtype=torch.uint8), 1.0)),
        ):
            assert "got 65" in str(op.refusal("triton", *args)), op.name
        per_head = Segment(k, k, torch.zeros(1, 65, 3, dtype=torch.int64))
        assert ops.segment_attention.refusal("triton", q, [per_head], 1.0) is None


@pytest.mark.parametrize("parts", [1, 17, 256, 300])
def test_all_parts_of_a_head_are_merged(parts: int) -> None:
    """In one round of loads, or in several where there are more than 256."""
    pytest.importorskip("triton")
    from kernels.gpu import decode

    device = device_of("triton")
    outs, lses = random(1, 6, parts, 80).to(device), 5 * random(2, 6, parts).to(device)
    lses[:, parts // 2 + 1 :: 3] = float("-inf")  # parts without a key
    got = decode.merged(outs, lses, outs.new_empty(2, 3, 1, 80))
    assert_close(got[0].view(6, 80), (outs * lses.softmax(1).unsqueeze(2)).sum(1), atol=1e-5, rtol=0)
    assert_close(got[1].view(6), lses.logsumexp(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["group_weights-g4-4100-sum", "attention_with_mean-gqa4-dim128"])
def test_more_parts_than_are_loaded_at_once_are_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kernels.gpu import choose, mean_value

    monkeypatch.setattr(choose, "_PIECE", 256)
    monkeypatch.setattr(choose, "_PARTS", 4)
    monkeypatch.setattr(mean_value, "_PARTS", 8)
    case = next(case for case in cases() if str(case) == name)
    results = []
    for backend in ("triton", REFERENCE):
        with use_backend(backend):
            result = getattr(ops, case.op)(*converted(case.args, torch.float32, device_of("triton")))
        results.append(result[0] if isinstance(result, tuple) else result)
    assert_close(*results, atol=2e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device takes it by right")
def test_nothing_is_interpreted_unless_it_is_asked_for() -> None:
    x = torch.rand(1, 2, 3, 40)
    ops.forget_used()
    ops.group_weights(x, 0.5, "sum")
    assert "triton" not in {name for used in ops.used_backends().values() for name in used}
    pytest.importorskip("triton")
    with use_backend("triton"):
        ops.group_weights(x, 0.5, "sum")
    assert ops.used_backends()["group_weights"][-1] == "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device takes it by right")
def test_without_a_gpu_triton_is_not_even_imported() -> None:
    code = "import sys, torch; from kernels import ops; ops.group_weights(torch.rand(1, 1, 2, 3), 1.0, 'sum'); "
    code += "print(sorted({'triton', 'kernels.gpu.choose'} & set(sys.modules)), ops.group_weights.refusal('triton'))"
    assert python("-c", code).startswith("[] import failed: ")
