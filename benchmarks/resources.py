"""What the kernels take of a GPU, found without one: each is compiled for Hopper and its machine code is read.

    python benchmarks/resources.py

Registers of a thread, bytes spilled to memory, and the loops: instructions (float64 ones, special-function ones among them) for
each column of a row that they load. Writes benchmarks/results/resources.json. Needs triton, with the assembler it brings.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # triton asks when it is imported
sys.path.insert(0, str(Path(__file__).parent.parent))

LOSS = {
    "logits": "*fp32",
    "gradient": "*bf16",
    "loss": "*fp64",
    "current": "*i32",
    "clean_token": "*i32",
    "weight": "*fp64",
    "row_scalars": "*fp64",
    "row_scalars_stride": "i32",
    "stride": "i32",
    "gradient_stride": "i32",
    "columns": "i32",
    "vocab": "i32",
}
DRAW = {
    "logits": "*fp32",
    "stride": "i32",
    "current": "*i64",
    "offsets": "*fp64",
    "uniforms": "*fp64",
    "row_scalars": "*fp64",
    "row_scalars_stride": "i32",
    "samples": "*i64",
    **dict.fromkeys(("first", "length", "low_key", "high_key", "step", "token_word", "jump_word", "route_word"), "i32"),
    "tokens": "*i64",
    "probabilities": "*fp64",
    "owns": "*fp64",
    "offs": "*fp64",
    "vocab": "i32",
    "mask": "i32",
}
ROWS = {"current": "*i64", "scalars": "*fp64", "count": "i32", "stride": "i32", "vocab": "i32"}
PROJECT = {"rows": "*fp32", "mu": "*fp32", "passes_out": "*i32", **ROWS, "states": "i32"}
AUDIT = {"rows": "*fp32", "counts": "*i64", "sums": "*fp64", **ROWS, "loose_low": "i64", "loose_high": "i64"}
NORM = {
    **{"x": "*fp32", "branch": "*bf16", "gate": "*bf16", "weight": "*fp32", "shift": "*bf16", "scale": "*bf16"},
    **{"total": "*fp32", "y": "*bf16", "means": "*fp32", "rs": "*fp32"},
    **dict.fromkeys(("length", "gate_stride", "shift_stride", "scale_stride"), "i32"),
    "eps": "fp32",
}
NORM_BACKWARD = {
    **{"dy": "*bf16", "dtotal": "*fp32", "total": "*fp32", "branch": "*bf16", "gate": "*bf16", "weight": "*fp32"},
    **{"scale": "*bf16", "means": "*fp32", "rs": "*fp32", "dx": "*fp32", "dbranch": "*bf16", "sums": "*fp32"},
    **dict.fromkeys(("length", "gate_stride", "scale_stride"), "i32"),
}
WHOLE = {"BRANCH": True, "GATE": True, "MODULATED": True, "ROWS": 16, "STAGES": 3, "BLOCK": 1024}
GELU_BACKWARD = {"upstream": "*bf16", "h": "*bf16", "gradient": "*bf16", "sums": "*fp32", "rows": "i32"}
STRIDES = (*(f"{part}_{way}" for part in "qkv" for way in ("example", "position", "head")), "new_position")
ROTARY = {
    **{"q": "*bf16", "k": "*bf16", "v": "*bf16", "cos": "*fp32", "sin": "*fp32"},
    **{"new_q": "*bf16", "new_k": "*bf16", "new_v": "*bf16"},
    **dict.fromkeys(("length", *STRIDES), "i32"),
}
UNIFORMS = {
    **{"samples": "*i64", "steps": "*i64", "result": "*fp64"},
    **dict.fromkeys(("row_stride", "site_stride", "step", "first", "count", "word", "low_key", "high_key"), "i64"),
}
TABLE = {"upstream": "*fp32", "order": "*i64", "keys": "*i16", "starts": "*i32", "sums": "*fp32", "gradient": "*fp32"}
TABLE |= dict.fromkeys(("stride", "shift", "rows"), "i32")
# of each kernel of the table's gradient: arguments, constants, warps
EMBEDDING: dict[str, tuple[tuple[str, ...], dict[str, int], int]] = {
    "chunks": (("upstream", "order", "keys", "sums", "stride"), {"CHUNK": 64, "LINES": 16, "STAGES": 3}, 8),
    "long": (
        ("upstream", "order", "keys", "starts", "sums", "gradient", "stride", "shift"),
        {"CHUNK": 64, "SHORT": 8, "LINES": 16, "STAGES": 3},
        8,
    ),
    "short": (("upstream", "order", "starts", "gradient", "stride", "rows"), {"SHORT": 8, "ROWS": 8}, 4),
}
ADAMW = {"owners": "*i32", "tensors": "*i64", "scalars": "*fp64", "constants": "*fp64"}
# what it is called, its module and name, its arguments, its constants, its warps
KERNELS: dict[str, tuple[str, str, dict[str, str], dict[str, Any], int]] = {
    **{
        f"{kind}, {'mask' if mask else 'no mask'}{'' if gradient else ', value only'}": (
            f"m2s.ops.{kind}.triton",
            f"_{kind}",
            LOSS,
            {"MASK": mask, "GRADIENT": gradient, "BLOCK": block},
            warps,
        )
        for kind, block, warps in (("posterior_entropy", 1024, 8), ("score_entropy", 512, 4), ("masked_ce", 1024, 8))
        for mask, gradient in ((False, True), (True, True), (True, False))
    },
    **{
        name: (
            "m2s.ops.reverse_step.triton",
            "_draw",
            DRAW,
            {"ROUTES": routes, "OTHER": other, "TILES": 32, "LINES": 8, "BLOCK": 256},
            4,
        )
        for name, routes, other in (
            ("draw", "none", False),
            ("step of bayes", "bayes", False),
            ("step of euler", "euler", True),
        )
    },
    **{
        f"project, {'log-scores, mask' if log else 'scores'}": (
            "m2s.ops.project.triton",
            "_project",
            PROJECT,
            {"MASK": log, "LOG": log, "FLOAT64": False, "FULL": True, "HELD": 8, "REST": 4, "BLOCK": 2048},
            16,
        )
        for log in (False, True)
    },
    **{
        f"classify{', mask' if mask else ''}": (
            "m2s.ops.classify.triton",
            "_measure",
            AUDIT,
            {"MASK": mask, "STEP": True, "LOG": False, "FLOAT32": True, "LINES": 4, "BLOCK": 1024},
            8,
        )
        for mask in (False, True)
    },
    "norm": ("m2s.ops.norm.triton", "_forward", NORM, {"WIDTH": 768, **WHOLE}, 8),
    "norm, backward": ("m2s.ops.norm.triton", "_backward", NORM_BACKWARD, {"WIDTH": 768, "HAS_DTOTAL": True, **WHOLE}, 8),
    "gelu, backward": (
        "m2s.ops.gelu.triton",
        "_backward",
        GELU_BACKWARD,
        {"WIDTH": 3072, "ROWS": 64, "STAGES": 3, "BLOCK": 1024},
        4,
    ),
    **{
        f"rotary{', backward' if back else ''}": (
            "m2s.ops.rotary.triton",
            "_rotate",
            ROTARY,
            {"HEADS": 12, "HALF": 32, "BACKWARD": back, "ROWS": 32, "BLOCK": 32},
            4,
        )
        for back in (False, True)
    },
    **{
        f"uniforms{', steps on the device' if steps else ''}": (
            "m2s.ops.philox.triton",
            "_uniforms",
            UNIFORMS,
            {"STEPS": steps, "BLOCK": 128},
            4,
        )
        for steps in (False, True)
    },
    **{
        f"embedding, {part}": (
            "m2s.ops.embedding.triton",
            f"_{part}",
            {name: TABLE[name] for name in names},
            {"WIDTH": 768, **constants, "BLOCK": 256},
            warps,
        )
        for part, (names, constants, warps) in EMBEDDING.items()
    },
    "bias columns, append": (
        "m2s.ops.bias_columns.triton",
        "_append",
        {"rows": "*fp32", "bias": "*fp32", "result": "*bf16", "count": "i32"},
        {"WIDTH": 768, "EXTRA": 8, "PADDED_EXTRA": 8, "ROWS": 8, "BLOCK": 256},
        4,
    ),
    "bias columns, drop": (
        "m2s.ops.bias_columns.triton",
        "_drop",
        {"columns": "*fp32", "factor": "*fp64", "result": "*fp32", "count": "i32"},
        {"WIDTH": 768, "STRIDE": 776, "ROWS": 8, "BLOCK": 256},
        4,
    ),
    "adamw": ("m2s.ops.adamw.triton", "_adamw", ADAMW, {"ALIGNED": True, "BF16": True, "BLOCK": 512}, 4),
}


def compiled(name: str, capability: int = 90) -> str:
    """The kernel as PTX. Rows begin where 16 bytes do, and lie a multiple of that apart, as padded logits do."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, function, signature, constants, warps = KERNELS[name]
    types = signature | dict.fromkeys(constants, "constexpr")
    aligned = [
        i
        for i, (key, kind) in enumerate(types.items())
        if kind.startswith("*") or key in ("stride", "gradient_stride", "columns", *STRIDES)
    ]
    source = ASTSource(
        fn=getattr(importlib.import_module(module), function),
        signature=types,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["ptx"]
    return ptx


def resources(ptx: str) -> dict[str, Any]:
    """What the assembler says of it, and its loops."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source, machine = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        for assembler in ("ptxas", "ptxas-blackwell"):  # which of the two knows this version of PTX
            said = subprocess.run(
                [tools / assembler, "-v", "-arch=sm_90a", source, "-o", machine], capture_output=True, text=True
            )
            if said.returncode == 0:
                break
        else:
            raise SystemExit(said.stderr)
        code = subprocess.run([tools / "nvdisasm", "-c", machine], capture_output=True, text=True, check=True).stdout
    text = said.stdout + said.stderr
    registers, spilled = (int(re.search(p, text).group(1)) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return {"registers": registers, "spilled_bytes": spilled, "loops": loops(code)}


def loops(code: str) -> list[dict[str, float]]:
    """The innermost loops that load columns, in the order of the code."""
    labels: dict[str, int] = {}
    body: list[tuple[str, str]] = []
    for line in code.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line.strip()):
            labels[label.group(1)] = len(body)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line):
            body.append((found.group(1), found.group(2)))
    spans = []
    for end, (operation, rest) in enumerate(body):
        target = re.search(r"(\.L_x_\d+)", rest)
        if operation.startswith("BRA") and target and labels.get(target.group(1), end + 1) <= end:
            spans.append((labels[target.group(1)], end + 1))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    found_loops = []
    for start, end in sorted(set(inner)):
        names = [operation for operation, _ in body[start:end]]
        columns = sum({"128": 4, "64": 2}.get(name.rsplit(".", 1)[-1], 1) for name in names if name.startswith("LDG"))
        if columns:
            doubles = sum(name.startswith(("DFMA", "DADD", "DMUL", "DSETP", "DMNMX", "F2F.F64")) for name in names)
            special = sum(name.startswith("MUFU") for name in names)
            found_loops.append(
                {
                    "columns": columns,
                    "instructions": round(len(names) / columns, 1),
                    "float64": round(doubles / columns, 1),
                    "special": round(special / columns, 1),
                }
            )
    return found_loops


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", action="append", choices=list(KERNELS), help="a kernel; by default all")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "resources.json")
    given = options.parse_args()
    import triton

    found = {name: resources(compiled(name)) for name in given.only or KERNELS}
    for name, one in found.items():
        widths = ", ".join(f"{loop['instructions']:g}" for loop in one["loops"])
        taken = f"{one['registers']:4d} registers {one['spilled_bytes']:4d} bytes spilled"
        print(f"{name:28s} {taken}  instructions a column {widths}")
    record = {"command": "python benchmarks/resources.py", "target": "sm_90a", "triton": triton.__version__, "kernels": found}
    if given.only is None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
