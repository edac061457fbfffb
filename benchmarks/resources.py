"""Registers and instructions of the Triton kernels, found without a GPU: each is compiled for Hopper, and its code is read.

    python benchmarks/resources.py

For each kernel: registers of a thread, bytes spilled to memory, and the innermost loops that load columns, with instructions
(float64 and special-function ones among them) for each column of a row. Writes benchmarks/results/resources.json. Needs triton,
with the assembler that comes with it. It is a script, and not a part of `m2s benchmark`, because triton must be imported
without its interpreter.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # triton reads it when it is imported
sys.path.insert(0, str(Path(__file__).parent.parent))  # runs from a checkout that is not installed

import torch

from m2s.ops.group_norm.tiles import BACKWARD, FORWARD, tile_of, warps_of


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel with the arguments it is compiled for.

    Args:
        operation: Folder in m2s/ops.
        function: Name of the kernel in its triton.py.
        types: Types of the arguments in their order, separated by spaces. i32/16 is a multiple of 16.
        constants: Values of the tl.constexpr arguments.
        warps: Number of warps.
    """

    operation: str
    function: str
    types: str
    constants: dict[str, Any]
    warps: int


LOSS = "*fp32 *bf16 *fp64 *i32 *i32 *fp64 *fp64 i32 i32/16 i32/16 i32/16 i32"
DRAW = f"*fp32 i32/16 *i64 *fp64 *fp64 *fp64 i32 *i64 {'i32 ' * 8}*i64 *fp64 *fp64 *fp64 i32 i32"
ANALYTIC = "*fp32 i32/16 *i64 *fp64 *fp64 i32 *i64 *fp64 i32"
PROJECT = "*fp32 *fp32 *i32 *fp64 *i64 *fp64 i32 i32/16 i32 i32"
CLASSIFY = "*fp32 *i64 *fp64 *i64 *fp64 *fp64 i32 i32/16 i32 i64 i64"
NORM = f"*fp32 *bf16 *bf16 *fp32 *bf16 *bf16 *fp32 *bf16 *fp32 *fp32 {'i32 ' * 4}fp32"
NORM_BACKWARD = "*bf16 *fp32 *fp32 *bf16 *bf16 *fp32 *bf16 *fp32 *fp32 *fp32 *bf16 *fp32 i32 i32 i32"
NORM_CONSTANTS = {"BRANCH": True, "GATE": True, "MODULATED": True, "ROWS": 16, "STAGES": 3, "BLOCK": 1024}
ROTARY = f"*bf16 *bf16 *bf16 *fp32 *fp32 *bf16 *bf16 *bf16 i32{' i32/16' * 10}"
GROUP_NORM = "*bf16 *bf16 *fp32 *fp32 *bf16 *fp32 *fp32 i32/16 i32/16 i32/16 fp32"
GROUP_NORM_BACKWARD = "*bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *fp32 *bf16 *fp32 *fp32 *fp32 i32/16 i32/16 i32/16"
UNIFORMS = f"*i64 *i64 *fp64{' i64' * 8}"

KERNELS: dict[str, Kernel] = {}  # by the names in resources.json
for operation, block, warps in (
    ("posterior_entropy", 1024, 8),
    ("score_entropy", 512, 4),
    ("factorized_entropy", 512, 4),
    ("cross_entropy", 1024, 8),
):
    for variant, mask, gradient in (("no mask", False, True), ("mask", True, True), ("mask, value only", True, False)):
        constants = {"MASK": mask, "GRADIENT": gradient, "BLOCK": block}
        KERNELS[f"{operation}, {variant}"] = Kernel(operation, f"_{operation}", LOSS, constants, warps)
for label, routes, other in (("draw", "none", False), ("step of bayes", "bayes", False), ("step of euler", "euler", True)):
    constants = {"ROUTES": routes, "OTHER": other, "TILES": 32, "LINES": 8, "BLOCK": 256}
    KERNELS[label] = Kernel("reverse_step", "_draw", DRAW, constants, 4)
for label, log, mask in (
    ("analytic step", True, False),
    ("analytic step, mask", True, True),
    ("analytic step, posteriors", False, False),
):
    constants = {"LOG": log, "MASK": mask, "TILES": 32, "LINES": 8, "BLOCK": 256}
    KERNELS[label] = Kernel("analytic_step", "_draw", ANALYTIC, constants, 4)
for label, log, write in (
    ("project, scores", False, True),
    ("project, log-scores, mask", True, True),
    ("threshold of the projection, mask", True, False),
):
    constants = {"MASK": log, "LOG": log, "WRITE": write, "FLOAT64": False, "FULL": True, "HELD": 8, "REST": 4, "BLOCK": 2048}
    KERNELS[label] = Kernel("project", "_project", PROJECT, constants, 16)
for label, mask, log, projected in (
    ("classify", False, False, False),
    ("classify, mask", True, False, False),
    ("classify, log-scores", False, True, False),
    ("classify, log-scores, mask", True, True, False),
    ("classify, projected", False, True, True),
    ("classify, projected, mask", True, True, True),
):
    constants = {"MASK": mask, "STEP": True, "PROJECTED": projected, "LOG": log, "FLOAT32": not log, "LINES": 4, "BLOCK": 1024}
    KERNELS[label] = Kernel("classify", "_measure", CLASSIFY, constants, 8)
KERNELS["norm"] = Kernel("norm", "_forward", NORM, {"WIDTH": 768, **NORM_CONSTANTS}, 8)
KERNELS["norm, backward"] = Kernel("norm", "_backward", NORM_BACKWARD, {"WIDTH": 768, "HAS_DTOTAL": True, **NORM_CONSTANTS}, 8)
for label, images, channels in (("CIFAR-10", 1024, 128), ("MNIST", 784, 64)):
    x, groups = torch.empty(1, channels, images, 1, device="meta"), min(32, channels // 4)
    for backward, elements in ((False, FORWARD), (True, BACKWARD)):
        tile = tile_of(x, groups, elements)
        constants = {
            "SHIFT": True,
            "CHANNELS": channels // groups,
            "GROUPS": tile.groups,
            "WIDTH": tile.width,
            "ROWS": tile.rows,
        }
        types, function = (GROUP_NORM_BACKWARD, "_backward") if backward else (GROUP_NORM, "_forward")
        warps = warps_of(tile.groups * tile.width * tile.rows)
        KERNELS[f"group norm{', backward' * backward}, {label}"] = Kernel("group_norm", function, types, constants, warps)
for label, backward in (("rotary", False), ("rotary, backward", True)):
    constants = {"HEADS": 12, "HALF": 32, "BACKWARD": backward, "ROWS": 32, "BLOCK": 32}
    KERNELS[label] = Kernel("rotary", "_rotate", ROTARY, constants, 4)
for label, steps in (("uniforms", False), ("uniforms, steps on the device", True)):
    KERNELS[label] = Kernel("philox", "_uniforms", UNIFORMS, {"STEPS": steps, "BLOCK": 128}, 4)
KERNELS["adamw"] = Kernel("adamw", "_adamw", "*i32 *i64 *fp64 *fp64", {"ALIGNED": True, "BLOCK": 512}, 4)


def compile_to_ptx(kernel: Kernel, capability: int = 90) -> str:
    """Compile a kernel.

    Args:
        kernel: The kernel. Its pointers are aligned to 16 bytes, as those of tensors are.
        capability: Compute capability of the GPU; 90 is Hopper.

    Returns:
        The kernel as PTX.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"m2s.ops.{kernel.operation}.triton"), kernel.function)
    types = kernel.types.split()
    names = [name for name in function.arg_names if name not in kernel.constants]
    signature = {name: kind.removesuffix("/16") for name, kind in zip(names, types, strict=True)}
    aligned = [i for i, kind in enumerate(types) if kind.startswith("*") or kind.endswith("/16")]
    source = ASTSource(
        fn=function,
        signature=signature | dict.fromkeys(kernel.constants, "constexpr"),
        constexprs=kernel.constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": kernel.warps}
    ptx: str = triton.compile(source, target=target, options=options).asm["ptx"]
    return ptx


def resources(ptx: str) -> dict[str, Any]:
    """Assemble a kernel and read its machine code.

    Args:
        ptx: The kernel as PTX.

    Returns:
        `registers` of a thread, `spilled_bytes`, and `loops`.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source, machine = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        for assembler in ("ptxas", "ptxas-blackwell"):  # triton ships both, and one of them knows its version of PTX
            command = [tools / assembler, "-v", "-arch=sm_90a", source, "-o", machine]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            raise SystemExit(done.stderr)
        code = subprocess.run([tools / "nvdisasm", "-c", machine], capture_output=True, text=True, check=True).stdout
    text = done.stdout + done.stderr
    registers, spilled = (int(re.search(p, text).group(1)) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return {"registers": registers, "spilled_bytes": spilled, "loops": loops(code)}


def loops(code: str) -> list[dict[str, float]]:
    """Find the innermost loops that load columns.

    Args:
        code: Output of nvdisasm.

    Returns:
        For each loop, in the order of the code: the columns it loads, and instructions per column.
    """
    labels: dict[str, int] = {}
    body: list[tuple[str, str]] = []  # operation and operands of each instruction
    for line in code.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line.strip()):
            labels[label.group(1)] = len(body)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line):
            body.append((instruction.group(1), instruction.group(2)))
    spans = []  # a branch to an earlier label ends a loop
    for end, (operation, operands) in enumerate(body):
        target = re.search(r"(\.L_x_\d+)", operands)
        if operation.startswith("BRA") and target and labels.get(target.group(1), end + 1) <= end:
            spans.append((labels[target.group(1)], end + 1))
    inner = {a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)}
    counts = [_count([operation for operation, _ in body[start:end]]) for start, end in sorted(inner)]
    return [count for count in counts if count]


def _count(names: list[str]) -> dict[str, float]:
    """Count the instructions of a loop for each column it loads; empty where it loads none."""
    columns = sum({"128": 4, "64": 2}.get(name.rsplit(".", 1)[-1], 1) for name in names if name.startswith("LDG"))
    if not columns:
        return {}
    doubles = sum(name.startswith(("DFMA", "DADD", "DMUL", "DSETP", "DMNMX", "F2F.F64")) for name in names)
    special = sum(name.startswith("MUFU") for name in names)
    kinds = {"instructions": len(names), "float64": doubles, "special": special}
    return {"columns": columns, **{kind: round(count / columns, 1) for kind, count in kinds.items()}}


def main() -> None:
    """Compile the kernels, print what they take, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(KERNELS), help="a kernel; by default all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "resources.json")
    options = parser.parse_args()
    import triton

    found = {name: resources(compile_to_ptx(KERNELS[name])) for name in options.only or KERNELS}
    for name, one in found.items():
        instructions = ", ".join(f"{loop['instructions']:g}" for loop in one["loops"])
        taken = f"{one['registers']:4d} registers {one['spilled_bytes']:4d} bytes spilled"
        print(f"{name:28s} {taken}  instructions a column {instructions}")
    result = {"command": "python benchmarks/resources.py", "target": "sm_90a", "triton": triton.__version__, "kernels": found}
    if options.only is None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
