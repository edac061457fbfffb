"""Schedulers of diffusers as an `M2SScheduler` that takes the same steps."""

from typing import Any

from m2s.errors import UserTypeError
from m2s.heads import Posterior
from m2s.hub.diffusers.scheduler import M2SScheduler
from m2s.process import Linear, Uniform


def from_diffusers(scheduler: Any, vocab: int) -> M2SScheduler:
    """Return the `M2SScheduler` that takes the same steps as a scheduler of diffusers.

    `DiscreteDDIMScheduler` is the Bayes step of uniform noise with alpha = 1 - t on a linear grid: the network's output is the
    logits of the posterior mu. Its corrector is a Gibbs move. `EntropyBoundScheduler` is the sampler `entropy_bound`. The last
    step differs from the latter's: here every token is drawn, and none is noise afterwards. The head and the sampler can also
    be given to `m2s.sample`, for a network that is called as model(x_t, t).

    Args:
        scheduler: The scheduler, or its configuration with `_class_name`.
        vocab: The number of tokens of the network.

    Returns:
        A scheduler with `head`, `sampler` and the same number of steps.

    Raises:
        UserTypeError: The scheduler has no equivalent here.

    Example:
        >>> same = from_diffusers(pipeline.scheduler, vocab=262_144)
        >>> tokens = m2s.sample(model, same.head, (4, 256), same.num_inference_steps, same.sampler, "linear")
    """
    config = dict(getattr(scheduler, "config", scheduler))
    kind = config.get("_class_name") or type(scheduler).__name__
    head = Posterior(Uniform(vocab, Linear()))
    if kind == "DiscreteDDIMScheduler":
        kept = ("num_inference_steps", "corrector_steps", "corrector_k", "corrector_selection", "corrector_selection_tau")
        return M2SScheduler.of(head, sampler="bayes", **{name: config[name] for name in kept if name in config})
    if kind == "EntropyBoundScheduler":
        return M2SScheduler.of(
            head,
            sampler="entropy_bound",
            sampler_options={"bound": config["entropy_bound"]},
            first_temperature=config["t_max"],
            last_temperature=config["t_min"],
            num_inference_steps=config["num_inference_steps"],
        )
    raise UserTypeError(
        option="scheduler",
        value=kind,
        expected="DiscreteDDIMScheduler or EntropyBoundScheduler",
        hint="for BlockRefinementScheduler the nearest sampler is 'confidence', which has no threshold",
    )
