"""Built-in weights as classic scripts, for the networks that the lab runs in the browser.

A page that is opened from the disk can read no file beside it, but it can load a script. So the script of NAME sets
`globalThis.m2sWeights[NAME]` to the base64 of a container:

    length of config.json, 4 bytes, little-endian | config.json | model.safetensors

`web/src/net/weights.ts` reads it.
"""

import base64
import json

from m2s.hub import builtin
from m2s.hub.folder import CONFIG, WEIGHTS


def container(name: str) -> bytes:
    """Return the configuration and the tensors of built-in weights in one piece.

    Args:
        name: One of `m2s.hub.builtin.names()`.

    Raises:
        FileNotFoundError: There are no weights of that name.
    """
    folder = builtin.locate(builtin.PREFIX + name)
    config = (folder / CONFIG).read_bytes()
    return len(config).to_bytes(4, "little") + config + (folder / WEIGHTS).read_bytes()


def weights_script(name: str) -> str:
    """Return the text of weights-NAME.js, a script that gives built-in weights to the lab.

    Args:
        name: One of `m2s.hub.builtin.names()`.

    Raises:
        FileNotFoundError: There are no weights of that name.
    """
    text = base64.b64encode(container(name)).decode("ascii")
    return f"(globalThis.m2sWeights ??= {{}})[{json.dumps(name)}] = {json.dumps(text)};\n"
