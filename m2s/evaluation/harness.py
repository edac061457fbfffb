"""m2s as a model of lm-evaluation-harness, under the name "m2s". Importing this module registers it.

    python -m m2s.evaluation.harness run --model m2s --model_args checkpoint=runs/owt --tasks lambada_openai

runs the command lm_eval with it, since lm_eval imports no models of other packages. In Python:

    import lm_eval
    import m2s.evaluation.harness

    lm_eval.simple_evaluate("m2s", model_args="checkpoint=runs/owt,passes=32", tasks=["lambada_openai"])

Log-likelihoods are minus a NELBO, that is a lower bound, of the continuation with the context clamped
(`m2s.evaluation.likelihood.conditional`).
"""

import warnings
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

import m2s.hub
from m2s import validation
from m2s.data.tokenizer import Tokenizer
from m2s.devices import resolve_device
from m2s.errors import UserError
from m2s.evaluation.likelihood import ESTIMATORS, Options
from m2s.evaluation.likelihood.conditional import Request, conditional_nats, encode_pair, is_greedy, windows
from m2s.progress import Progress
from m2s.rng import derived_seed
from m2s.samplers import sample

THEIR_DEFAULT = "cuda:0"  # the device that the command lm_eval gives to a model


@register_model("m2s")
class Harness(LM):
    """A checkpoint of m2s in lm-evaluation-harness.

    Args:
        checkpoint: A folder or a repository of the Hugging Face hub.
        estimator: A name in `m2s.evaluation.likelihood.ESTIMATORS`.
        passes: Draws of noise for each request.
        seed: The seed of noise and samples. A request has the same noise in any order and batch.
        batch_size: Requests of one length in a call of the network.
        max_length: The greatest number of tokens; 0: the length that the checkpoint was trained on.
        greedy: Whether to decode greedily, which metrics such as the accuracy of LAMBADA need; masking noise only.
        steps: Sampling steps of a generation.
        max_gen_toks: Tokens of a generation, unless a task says otherwise.
        temperature: Sharpens the posterior of a generation, unless a task says otherwise.
        device: "cpu" or "cuda"; empty: cuda where there is a GPU. "cuda:0", which lm_eval gives unless --device is given, is
            "cpu" where there is none.
        max_batch_size: Not used. The harness passes it to every model.

    Attributes:
        missing: What the estimator lacks for a bound; nothing: log-likelihoods are lower bounds.

    Raises:
        UserError: The checkpoint has no tokenizer or no length, the estimator does not support it, or a number is out of range.
    """

    def __init__(
        self,
        checkpoint: str,
        estimator: str = "nelbo",
        passes: int = 16,
        seed: int = 0,
        batch_size: int | str = 16,
        max_length: int = 0,
        greedy: bool = True,
        steps: int = 64,
        max_gen_toks: int = 64,
        temperature: float = 1.0,
        device: str = "",
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        del max_batch_size
        self._device = resolve_device("" if device == THEIR_DEFAULT and not torch.cuda.is_available() else device or "")
        loaded = m2s.hub.load(checkpoint, self._device, verify=True)
        if loaded.tokenizer is None:
            raise UserError(f"{checkpoint} has no tokenizer, which lm-evaluation-harness needs: {loaded.tokenizer_hint}")
        self.model, self.head, self.text_tokenizer = loaded.model.float(), loaded.head, loaded.tokenizer
        trained = (loaded.data or {}).get("length")
        if not max_length and not isinstance(trained, int):
            raise UserError(f"{checkpoint} does not say how long its texts are: give max_length")
        self.max_length = max_length or int(trained or 0)
        for name, value in (("passes", passes), ("max_length", self.max_length), ("steps", steps)):
            validation.positive_int(name, value)
        chosen = ESTIMATORS.find(estimator, "estimator")
        if reason := chosen.unsupported(self.head):
            raise UserError(option="estimator", value=estimator, reason=f"it does not support {self.head}: {reason}")
        self.missing = chosen.missing(self.head, Options())
        self.estimator, self.passes, self.seed, self.greedy = estimator, passes, seed, greedy
        self.batch_size = 16 if batch_size == "auto" else int(batch_size)
        self.steps, self.max_gen_toks, self.temperature = steps, max_gen_toks, temperature

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""
        return self.text_tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for the harness's cache of requests."""
        return repr(self.text_tokenizer)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Estimate a lower bound on log p(continuation | context).

        Args:
            requests: Requests with args (context, continuation).
            disable_tqdm: Show no progress.

        Returns:
            The estimate in nats for each request, and whether greedy decoding gives the continuation (False with greedy=False
            or another noise than masking).
        """
        pairs = [encode_pair(self.text_tokenizer, *request.args) for request in requests]
        nats = self._nats(pairs, disable_tqdm)
        return [(-each, self._is_greedy(pair)) for each, pair in zip(nats, pairs, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Estimate a lower bound on log p(document), for perplexities.

        A long document is cut into windows, in which every token is predicted once (`windows`).

        Args:
            requests: Requests with args (text,).
            disable_tqdm: Show no progress.

        Returns:
            The estimate in nats for each request.
        """
        pairs = [encode_pair(self.text_tokenizer, "", request.args[0]) for request in requests]
        return [-each for each in self._nats(pairs, disable_tqdm)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Sample continuations of contexts, and cut each at the first stop string or end token.

        Args:
            requests: Requests with args (context, options). Of the options "until", "max_gen_toks" and, with "do_sample",
                "temperature" count.
            disable_tqdm: Show no progress.

        Returns:
            One text for each request.
        """
        found = []
        with Progress(len(requests), "generating", "request", quiet=disable_tqdm) as progress:
            for request in progress.over(requests):
                context, options = request.args
                found.append(self._generate(context, dict(options)))
        return found

    def _nats(self, pairs: list[Request], quiet: bool) -> list[float]:
        """The NELBO of every request, in nats, summed over its windows."""
        parts = [list(windows(pair, self.max_length)) for pair in pairs]
        every = [part for each in parts for part in each]
        with Progress(len(every), "estimating", "request", quiet=quiet) as progress:
            settings = (self.passes, self.seed, self.batch_size, self.estimator, None, self._device, progress.update)
            nats = conditional_nats(self.model, self.head, every, *settings)[0].tolist()
        totals, first = [], 0
        for each in parts:
            totals.append(sum(nats[first : first + len(each)]))
            first += len(each)
        return totals

    def _is_greedy(self, pair: Request) -> bool:
        """Whether greedy decoding gives the continuation."""
        rank_one = self.head.process.rank_one
        masks = rank_one is not None and rank_one.is_pure_mask and self.head.has_posterior
        if not self.greedy or len(pair.tokens) > self.max_length:
            return False
        if not masks:
            warnings.warn(
                f"greedy decoding is defined for masking noise, not for {self.head}: is_greedy is False", stacklevel=2
            )
            return False
        return is_greedy(self.model, self.head, pair, self._device)

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        """One continuation."""
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        count = min(int(options.get("max_gen_toks", self.max_gen_toks)), self.max_length - 1)
        temperature = options.get("temperature") if options.get("do_sample") else None
        end = self.text_tokenizer.end
        given = self.text_tokenizer.encode(context) or ([] if end is None else [end])
        given = given[max(0, len(given) + count - self.max_length) :]
        clamp = torch.tensor([[*given, *[-1] * count]])
        number = Request(tuple(given), (0,)).number
        drawn = sample(
            self.model,
            self.head,
            (1, clamp.shape[1]),
            steps=self.steps,
            seed=derived_seed(self.seed, number),
            clamp=clamp,
            temperature=float(temperature or self.temperature),
        )
        tokens = torch.as_tensor(drawn)[0, len(given) :].tolist()
        if end is not None and end in tokens:
            tokens = tokens[: tokens.index(end)]
        text = self.text_tokenizer.decode(tokens)
        for stop in until:
            text = text.split(stop)[0] if stop else text
        return text


def main() -> None:
    """Run the command of lm_eval, with the model "m2s" registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
