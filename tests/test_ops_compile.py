"""Every kernel compiles for GPUs, on a machine without one: what an interpreter takes, a compiler may not.

Also that it keeps its values in registers: a spill would mean more memory traffic than was counted.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

LOSS = {
    "logits": "*fp32",
    "gradient": "*bf16",
    "loss": "*fp64",
    "current": "*i32",
    "clean_token": "*i32",
    "weight": "*fp64",
    "scalars": "*fp64",
    "rows": "i32",
    "stride": "i32",
    "columns": "i32",
    "vocab": "i32",
}
KERNELS = [
    (f"m2s.ops.{kind}.triton", f"_{kind}", LOSS, {"MASK": mask, "GRADIENT": gradient, "BLOCK": block}, warps)
    for kind, block, warps in (("bridged", 1024, 16), ("free", 2048, 8), ("masked", 1024, 8))
    for mask, gradient in ((False, True), (True, True), (True, False))
]
DRAW = {
    "logits": "*fp32",
    "stride": "i32",
    "current": "*i64",
    "offsets": "*fp64",
    "uniforms": "*fp64",
    "numbers": "*fp64",
    "column_stride": "i32",
    "samples": "*i64",
    **dict.fromkeys(("first", "length", "low_key", "high_key", "step", "token_word", "jump_word", "route_word"), "i32"),
    "tokens": "*i64",
    "shares": "*fp64",
    "owns": "*fp64",
    "offs": "*fp64",
    "vocab": "i32",
    "mask": "i32",
}
KERNELS += [
    ("m2s.ops.draw.triton", "_draw", DRAW, {"ROUTES": routes, "OTHER": other, "TILES": 32, "LINES": 8, "BLOCK": 256}, 4)
    for routes, other in (("none", False), ("bayes", False), ("euler", True))
]
ROWS = {"current": "*i32", "scalars": "*fp64", "count": "i32", "stride": "i32", "vocab": "i32"}
PROJECT = {"rows": "*fp32", "mu": "*fp32", "taken": "*i32", **ROWS, "states": "i32"}
KERNELS += [
    ("m2s.ops.project.triton", "_nearest", PROJECT, {"MASK": mask, "LOG": log, "WIDE": False, "BLOCK": 8192}, 16)
    for mask, log in ((False, False), (True, True))
]
AUDIT = {"rows": "*fp32", "counts": "*i32", "sums": "*fp64", **ROWS}
KERNELS += [
    ("m2s.ops.audit.triton", "_measure", AUDIT, {"SQUARES": squares, "LOG": False, "BLOCK": 2048}, 8)
    for squares in (False, True)
]

COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, signature, constants, warps in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(module), name)
    types = signature | {key: "constexpr" for key in constants}
    for capability in (80, 90):
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert compiled.asm["ptx"].count(".entry") == 1
        assert "__local_depot" not in compiled.asm["ptx"], (name, capability)
        print(name, capability, constants)
"""


def test_kernels_compile_for_gpus():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(KERNELS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == {name for _, name, *_ in KERNELS}
