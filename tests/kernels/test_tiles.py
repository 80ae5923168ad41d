"""The arithmetic of AMX tiles in plain C++, built for a processor without them: so it is held on every machine."""

from __future__ import annotations

import platform
from functools import cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType

import pytest
import torch
from torch.testing import assert_close

from kernels import block as reference
from kernels import ops
from kernels.cpu.ffi import library
from kernels.dispatch import REFERENCE
from tests.kernels.op_cases import OpCase, cases, converted, random
from tests.kernels.test_block import close, drawn

OPS = {op.name: op for op in ops.ALL}
COMPUTED = ("prefill_attention", "prefill_attention_with_column_sums", "column_sums", "windowed_attention")
OTHERS = {"coded_attention": "coded", "row_scores": "scores", "page_scores": "scores", "rebuild_keys": "rebuild"}
BF16 = torch.bfloat16
MODULES = ("alike", "block", "coded", "prefill", "rebuild", "scores")
PROMPTS = ("long-qwen3-prompt", "long-wide-prompt", "many-sequences")  # and steps that the compiled products take


@cache
def built(name: str) -> ModuleType:
    """Return a second instance of a module of kernels.cpu, with a library of its own that computes tiles in
    C++. To compile it takes longer than to run it, so the compiler optimises little."""
    pytest.importorskip(f"kernels.cpu.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_HARNESS_PLAIN_TILES", "1")
        patch.setattr(library, "FLAGS", [*library.FLAGS, "-O1"])
        if platform.machine() == "x86_64":
            patch.setenv("KV_HARNESS_MARCH", "x86-64-v3")
        spec = find_spec(f"kernels.cpu.{name}")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:  # a compiler that does not know this processor
            pytest.skip(str(error))
    assert module.FAST[BF16] if name == "prefill" else module._library.is_on_tiles()
    return module


def test_keys_that_are_alike_on_tiles_are_those_in_fp32() -> None:
    """Also on the tiles of this processor, if it has them."""
    plain = built("alike").last_alike
    # few are alike, in more blocks than are compared with at once
    mixed = random(5, 1, 1, 2000, 64)
    for keys, threshold in [(mixed, 0.5), *(case.args for case in cases() if case.op == "last_alike")]:
        wanted = OPS["last_alike"].backend(REFERENCE).run(keys, threshold)
        for run in (plain, OPS["last_alike"].backend("cpu").run):
            assert_close(run(keys, threshold), wanted)


@pytest.mark.parametrize("case", [case for case in cases() if case.op in (*COMPUTED, *OTHERS)], ids=str)
def test_what_runs_on_tiles_equals_its_definition(case: OpCase) -> None:
    name, tolerance = ("prefill", 2e-2) if case.op in COMPUTED else (OTHERS[case.op], 1e-2)
    module, args = built(name), converted(case.args, BF16)
    if reason := getattr(module, f"{case.op}_refuses")(*args):
        pytest.skip(reason)
    got = getattr(module, case.op)(*args)
    wanted = OPS[case.op].backend(REFERENCE).run(*converted(args, torch.float64))
    for ours, theirs in [(got, wanted)] if isinstance(got, torch.Tensor) else zip(got, wanted, strict=True):
        assert torch.equal(ours.isinf(), theirs.isinf())
        ours, theirs = (x.double().masked_fill(x.isinf(), 0) for x in (ours, theirs))
        assert_close(ours, theirs, atol=tolerance * max([1, *theirs.abs().flatten().tolist()]), rtol=0)


@pytest.mark.parametrize("shape", PROMPTS)
def test_products_on_tiles_equal_plain_torch(shape: str) -> None:
    block, (weights, *inputs) = built("block"), drawn(shape, BF16)
    theirs = reference.attention_inputs(inputs[0], weights, *inputs[1:])
    assert block.attention_inputs_refuses(inputs[0], weights, *inputs[1:]) is None
    for one, other in zip(block.attention_inputs(inputs[0], weights, *inputs[1:]), theirs, strict=True):
        close(one, other)
    attended = theirs[1]
    close(block.block_output(inputs[0], attended, weights), reference.block_output(inputs[0], attended, weights))
