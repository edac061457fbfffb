"""Scripts that compile, each in a process of its own: the tests' shape checker does not compile."""

import torch
from fork_server import run_script

BEGINNING = """
import sys

import torch
from torch._dynamo.backends.common import aot_autograd

device = sys.argv[1]
graphs = []  # of each that was compiled with `keep`, the names of what it calls


def keep(graph, inputs):
    graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
    return graph
"""


def passes(script: str) -> None:
    """`script` after the beginning above, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = run_script(BEGINNING + script, device)
    assert done.returncode == 0, done.stderr[-3000:]
