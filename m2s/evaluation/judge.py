"""The judge of generative perplexity: a causal language model that gives -log p(token | tokens before), in nats.

judge = load_judge("gpt2-large")              # a name on the Hugging Face hub, a folder, or a .gguf file
readings = judge.tokenize_all(texts)
output = judge.read([reading.ids for reading in readings])
output.nll                                    # one array for each text
output.last, output.mean                      # hidden states as embeddings of the texts, each [n, H]
"""

import contextlib
import copy
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Shaped
from safetensors import SafetensorError
from torch import Tensor

from m2s.devices import resolve_device
from m2s.errors import UserError, print_escaped
from m2s.evaluation.gguf import gguf_values
from m2s.evaluation.judge_files import EXTRA, describe_variant, download_hint, locate, require_download
from m2s.progress import Progress

END = "<|endoftext|>"  # the end of a document in a text
LOGITS = {"cpu": 2**26, "cuda": 2**29}  # greatest number of logits in memory at once: 256 MiB and 2 GiB in float32
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TokenizedText:
    """A text as a judge reads it.

    Args:
        ids: The judge's tokens. The first is not predicted.
        bytes: The number of bytes of the text of the predicted tokens.
    """

    ids: list[int]
    bytes: int


@dataclass(frozen=True)
class JudgeOutput:
    """What one pass of a judge over some sequences gives.

    Args:
        nll: -log p of each token after the first, one array for each sequence.
        last: The hidden state of the last layer at the last token, [n, H].
        mean: The mean of these hidden states over the tokens, [n, H].
    """

    nll: list[Float[np.ndarray, "_"]]
    last: Float32[np.ndarray, "n H"]
    mean: Float32[np.ndarray, "n H"]


@dataclass(frozen=True)
class Judge:
    """A causal language model and its tokenizer.

    Args:
        name: The name or path that it was loaded from.
        model: The model of transformers.
        tokenizer: The tokenizer of transformers.
        bos: The id that goes before every text and is never scored; None for a model that was trained without one.
        inseparable: The last layer cannot be called apart from the rest of the network.
    """

    name: str
    model: Any
    tokenizer: Any
    bos: int | None
    inseparable: bool

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def vocab(self) -> int:
        """The number of tokens of the network. The tokenizer may have fewer."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def context(self) -> int | None:
        """The length of the longest sequence that it can read; None where its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def end(self) -> int | None:
        """The token that ends a document: <|endoftext|> where it is one token, else the EOS token."""
        index = self.tokenizer.get_vocab().get(END)
        return self.tokenizer.eos_token_id if index is None else index

    def describe(self) -> dict[str, Any]:
        """Return what a result stores about its judge."""
        return {
            "name": self.name,
            "kind": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "vocab": self.vocab,
            "bos": self.bos,
            "end": self.end,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def tokenize(self, text: str, limit: int | None = None, bos: bool = True) -> TokenizedText:
        """Tokenize a text.

        Every <|endoftext|> becomes the judge's end token, which has no bytes. Without a BOS token the first token is context
        only, and its bytes do not count. The bytes of a token start where the token before it ends.

        Args:
            text: The text.
            limit: The greatest number of tokens, without the BOS token; None: all.
            bos: Put the BOS token first, for a judge that has one.

        Returns:
            The tokens, and the bytes of those that are predicted.

        Raises:
            UserError: The text has an <|endoftext|>, and the judge has no token for it.
        """
        return self.tokenize_all([text], limit, bos)[0]

    def tokenize_all(self, texts: Sequence[str], limit: int | None = None, bos: bool = True) -> list[TokenizedText]:
        """Tokenize several texts at once, which is faster than one at a time. See `tokenize`.

        Args:
            texts: The texts.
            limit: The greatest number of tokens of each, without the BOS token; None: all.
            bos: Put the BOS token first, for a judge that has one.

        Returns:
            The tokens of each text, and the bytes of those that are predicted.

        Raises:
            UserError: A text has an <|endoftext|>, and the judge has no token for it.
        """
        pieces = [text.split(END) for text in texts]
        if self.end is None and any(len(parts) > 1 for parts in pieces):
            raise UserError(f"the judge {self.name} has no token for {END}: choose another judge")
        flat = [piece for parts in pieces for piece in parts]
        coded = self.tokenizer(flat, add_special_tokens=False, return_offsets_mapping=True) if flat else {"input_ids": []}
        encoded = zip(flat, coded["input_ids"], coded.get("offset_mapping", []), strict=True)
        return [self._join(itertools.islice(encoded, len(parts)), limit, bos) for parts in pieces]

    def _join(self, pieces: Iterable[tuple[str, list[int], list[Any]]], limit: int | None, bos: bool) -> TokenizedText:
        """Join the encoded pieces of a text, with the end token between them."""
        ids: list[int] = []
        sizes: list[int] = []
        for number, (piece, piece_ids, offsets) in enumerate(pieces):
            if number:
                assert self.end is not None  # tokenize_all checks it
                ids.append(self.end)
                sizes.append(0)
            ids += piece_ids
            sizes += _sizes(piece, [stop for _, stop in offsets])
        ids, sizes = ids[:limit], sizes[:limit]
        if bos and self.bos is not None:
            return TokenizedText([self.bos, *ids], sum(sizes))
        return TokenizedText(ids, sum(sizes[1:]))

    def nll(self, sequences: Sequence[Sequence[int]], batch_size: int = 8) -> list[Float[np.ndarray, "_"]]:
        """Compute -log p(ids[j+1] | ids[..j]) for each j.

        Args:
            sequences: The tokens of each sequence.
            batch_size: Sequences per call of the network.

        Returns:
            One array for each sequence, in the given order.

        Raises:
            UserError: A sequence is too long for the judge, or has an unknown token.
        """
        return self.read(sequences, batch_size).nll

    def read(self, sequences: Sequence[Sequence[int]], batch_size: int = 8, skip: int = 0) -> JudgeOutput:
        """Compute the NLL of each token and embeddings of each sequence, in one pass.

        Sequences of similar length are batched, the longest first, and padded on the right, where causal attention ignores it.
        Logits are converted to float32. They are computed for real positions only, some at a time.

        Args:
            sequences: The tokens of each sequence.
            batch_size: Sequences per call of the network.
            skip: The number of first positions, such as that of a BOS token, that the mean of the hidden states leaves out.

        Returns:
            NLL and embeddings, in the given order. The embedding of a sequence without a token is zero.

        Raises:
            UserError: A sequence is too long for the judge, or has an unknown token.
        """
        self._check(sequences)
        nll = [np.zeros(0) for _ in sequences]
        states = np.zeros((2, len(sequences), 0), np.float32)
        order = sorted((i for i, ids in enumerate(sequences) if len(ids)), key=lambda i: -len(sequences[i]))
        with Progress(len(order), "judging", "sequence") as progress:
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                values, pooled = self._batch([sequences[i] for i in rows], skip)
                if not start:
                    states = np.zeros((2, len(sequences), pooled.shape[2]), np.float32)
                states[:, rows] = pooled
                for row, value in zip(rows, values, strict=True):
                    nll[row] = value
                progress.update(len(rows))
        return JudgeOutput(nll, states[0], states[1])

    def _check(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raise UserError if a sequence is too long or has an unknown token."""
        for number, ids in enumerate(sequences):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab:
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise UserError(
                    f"sequence {number} holds the id {wrong}, but the judge {self.name} knows 0..{self.vocab - 1}: "
                    "it has another vocabulary"
                )
            if self.context is not None and len(ids) > self.context:
                raise UserError(
                    f"sequence {number} has {len(ids)} tokens of the judge {self.name}, which reads at most {self.context}: "
                    "draw shorter samples, or choose a protocol that cuts them or another judge"
                )

    @torch.inference_mode()
    def _batch(
        self, sequences: list[Sequence[int]], skip: int
    ) -> tuple[list[Float[np.ndarray, "_"]], Float32[np.ndarray, "2 n H"]]:
        """Compute the NLL, and the last and the mean hidden state, of one batch."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        real = (torch.arange(ids.shape[1]) < lengths[:, None]).to(self.device)
        ids = ids.to(self.device)
        options = {"input_ids": ids, "attention_mask": real.long(), "use_cache": False}
        predicts, targets = real[:, 1:], ids[:, 1:][real[:, 1:]]
        nll = torch.zeros(0, device=self.device)
        if self.inseparable:
            output = self.model(**options, output_hidden_states=True)
            hidden = output.hidden_states[-1]
            nll = _nll(output.logits[:, :-1][predicts], targets)
        else:
            output = self.model.base_model(**options)
            hidden = output.last_hidden_state
            states = hidden[:, :-1][predicts]
            at_once = max(1, LOGITS.get(self.device.type, LOGITS["cpu"]) // self.vocab)
            parts = zip(states.split(at_once), targets.split(at_once), strict=True)
            if len(targets):
                nll = torch.cat([_nll(_last_layer(self.model, output, some)[0], known) for some, known in parts])
        values = [part.numpy() for part in nll.double().cpu().split((lengths - 1).tolist())]
        return values, _pool(hidden, real, skip).cpu().numpy()


def _pool(hidden: Shaped[Tensor, "n L H"], real: Bool[Tensor, "n L"], skip: int) -> Float32[Tensor, "2 n H"]:
    """Return the hidden state at the last real position, and the mean over real positions from `skip` on.

    A sequence that has no position from `skip` on has the same state for both.
    """
    lengths = real.sum(1)
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    pooled = real & (torch.arange(real.shape[1], device=real.device) >= skip)
    count = pooled.sum(1, keepdim=True)
    # Padding may hold NaN, which a product with 0 would keep.
    total = hidden.float().masked_fill(~pooled[..., None], 0.0).sum(1)
    return torch.stack([last, torch.where(count > 0, total / count.clamp(min=1), last)])


def _nll(logits: Shaped[Tensor, "m V"], targets: Int[Tensor, "m"]) -> Float[Tensor, "m"]:
    """Return -log softmax at the targets.

    F.cross_entropy on a CPU has an error of 5e-5 over 262,144 tokens in float32; this has 2e-6.
    """
    logits = logits.float()
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]


def _last_layer(model: Any, output: Any, states: Shaped[Tensor, "m H"]) -> Shaped[Tensor, "1 m V"]:
    """Compute the logits of hidden states by the model's code, which may scale or cap the output of its last layer."""
    replacement = copy.copy(output)
    replacement["last_hidden_state"] = states[None]
    with _with_output(model.base_model, replacement):
        return model(input_ids=torch.zeros(1, len(states), dtype=torch.long, device=states.device), use_cache=False).logits


@contextlib.contextmanager
def _with_output(module: Any, output: Any) -> Iterator[None]:
    """Inside the block `module` is not run and returns `output`."""
    previous = module.__dict__.get("forward")
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward
        if previous is not None:
            module.forward = previous


@torch.inference_mode()
def _last_layer_is_inseparable(model: Any) -> bool:
    """Return whether the last layer, called apart on two tokens, gives other logits than the full model."""
    ids = torch.tensor([[0, 1]], device=model.device)
    expected = model(input_ids=ids, use_cache=False).logits
    if model.base_model is model:
        return True
    try:
        output = model.base_model(input_ids=ids, use_cache=False)
        apart = _last_layer(model, output, output.last_hidden_state[0])
    except (AttributeError, TypeError, KeyError):
        return True
    return not torch.allclose(apart.float(), expected.float(), rtol=1e-3, atol=1e-3)


def _sizes(text: str, stops: list[int]) -> list[int]:
    """Return the bytes of each token, from the end of the token before it. The last one extends to the end of the text."""
    if not stops:
        return []
    ends = np.maximum.accumulate([*stops[:-1], len(text)])
    if not text.isascii():
        ends = np.cumsum([0, *(len(character.encode()) for character in text)], dtype=np.int64)[ends]
    return np.diff(ends, prepend=0).tolist()


def load_judge(name: str, device: str = "", dtype: str = "") -> Judge:
    """Load a judge.

    Args:
        name: A .gguf file, a folder with config.json, weights and tokenizer, or a model on the Hugging Face hub. Files and
            folders are also searched in $M2S_DATA/judges, and a model of the hub by the last part of its name.
        device: cpu, cuda or mps; "": the best that is available.
        dtype: float32, bfloat16 or float16; "": float32 on the CPU, and as stored elsewhere. A .gguf file is dequantized.

    Returns:
        The judge in eval mode.

    Raises:
        UserError: It cannot be loaded. The message says how to get it.
    """
    place, options = locate(name)
    if variant := describe_variant(name):
        print_escaped(variant, file=sys.stderr)
    if importlib.util.find_spec("transformers") is None:
        _transformers()  # which raises the error
    if place == name and not Path(name).expanduser().exists():
        require_download(name)  # before transformers is imported, which takes seconds
    transformers = _transformers()
    if dtype and dtype not in DTYPES:
        raise UserError(f"the dtype is {dtype!r}, but it must be one of {', '.join(DTYPES)}")
    device = resolve_device(device)
    precision = getattr(torch, dtype) if dtype else torch.float32 if torch.device(device).type == "cpu" else "auto"
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=precision, trust_remote_code=False, **options)
    except (OSError, ValueError, LookupError, ImportError, RuntimeError, AttributeError, TypeError, SafetensorError) as error:
        raise UserError(f"the judge {name} could not be loaded ({_first_line(error)}); {download_hint(name)}") from error
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer of the judge {name} has no character offsets: choose another judge")
    model = model.to(device).eval()
    # The name of what was loaded, which may be a quantized copy of the model that was asked for.
    loaded = name if place == name or Path(name).expanduser().exists() else options.get("gguf_file", Path(place).name)
    return Judge(loaded, model, tokenizer, _bos(name, place, options, model, tokenizer), _last_layer_is_inseparable(model))


def _transformers() -> Any:
    """Import transformers, which is optional and slow to import."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"a judge needs the package transformers ({error}): pip install {EXTRA}") from error


def _bos(name: str, place: str, options: dict[str, str], model: Any, tokenizer: Any) -> int | None:
    """Return the id that goes before a text: if the .gguf file says so, the tokenizer adds one, or the model is a Gemma.

    Gemma's tokenizer may not add one, but the model was trained with it.
    """
    bos = tokenizer.bos_token_id
    if "gguf_file" in options:
        values = gguf_values(Path(place) / options["gguf_file"])
        wanted = values.get("tokenizer.ggml.add_bos_token", values.get("tokenizer.ggml.model") == "llama")
    else:
        wanted = tokenizer("").get("input_ids")[:1] == [bos] or model.config.model_type.startswith("gemma")
    if wanted and bos is None:
        raise UserError(f"the judge {name} needs a BOS token before every text, but its tokenizer has no bos_token")
    return int(bos) if wanted else None


def _first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
