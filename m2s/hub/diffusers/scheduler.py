"""`M2SScheduler`: one step of a sampler of m2s for each call of the network that a pipeline makes."""

from typing import Any, Literal

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.errors import UserError, UserTypeError
from m2s.heads import Head
from m2s.hub.config import from_dict, to_dict
from m2s.hub.diffusers.output import M2SSchedulerOutput
from m2s.hub.diffusers.temperature import Temperatures
from m2s.hub.diffusers.token_ids import from_pipeline, to_pipeline
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.rng import draw_seed
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.capabilities import default_sampler
from m2s.samplers.informed import SELECTIONS, Informed
from m2s.samplers.prediction import LogitsProcessor, Prediction
from m2s.samplers.predictor_corrector import gibbs
from m2s.samplers.registry import make_sampler
from m2s.samplers.reverse_process import make_plan, take_step

# The names of diffusers for the choice of the sites of a correction, and those of the sampler `informed`.
CHOICES = {
    "random": None,
    "lowest_log_margin": "margin",
    "lowest_current_prob": "current_probability",
    "lowest_maxprob": "greatest_probability",
}


class M2SScheduler(SchedulerMixin, ConfigMixin):
    """A scheduler of diffusers that takes steps of a sampler of m2s.

    `M2SScheduler.of(head)` builds one from a head. The constructor takes what a configuration file holds.

    Args:
        head: The description of the head and its process, `m2s.hub.config.to_dict(head)`.
        sampler: A name in `m2s.samplers.SAMPLERS`, or "auto".
        sampler_options: Options of the sampler.
        grid: A name in `m2s.samplers.GRIDS`.
        num_inference_steps: Calls of the network.
        on: The distribution that temperature, top-k and top-p sharpen, "posterior" or "leave_one_out".
        first_temperature: The temperature at the first step, in place of the argument of `step`.
        last_temperature: It decreases linearly to this value, which it would have after the last step.
        t_min: The network sees times in [t_min, 1 - t_min].
        block_length: Tokens of a block of `LLaDA2Pipeline`.
        corrector_steps: Calls of `step_correct` after a step, in `DiffusionGemmaPipeline`.
        corrector_k: Sites that one call of `step_correct` draws again.
        corrector_selection: "random", which keeps p_s for one site, or a confidence as in diffusers.
        corrector_selection_tau: Temperature of the choice of sites.

    Raises:
        UserError: An option is invalid.
        UserTypeError: The sampler has no reverse process, or has random times.
    """

    order = 1

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        head: dict[str, Any],
        sampler: str = "auto",
        sampler_options: dict[str, Any] | None = None,
        grid: str = "linear",
        num_inference_steps: int = 32,
        on: Literal["posterior", "leave_one_out"] = "posterior",
        first_temperature: float | None = None,
        last_temperature: float | None = None,
        t_min: float = 1e-3,
        block_length: int = 32,
        corrector_steps: int = 0,
        corrector_k: int = 1,
        corrector_selection: str = "random",
        corrector_selection_tau: float = 1.0,
    ) -> None:
        self.head: Head = from_dict(head)
        validation.choice("corrector_selection", corrector_selection, CHOICES)
        validation.in_interval("t_min", t_min, "(0, 0.5)")
        if (first_temperature is None) != (last_temperature is None):
            raise UserError(option="first_temperature", reason="only one of the two temperatures is given", hint="give both")
        chosen = make_sampler(default_sampler(self.head) if sampler == "auto" else sampler, **(sampler_options or {}))
        if not isinstance(chosen, Sampler):
            raise UserTypeError(option="sampler", value=sampler, reason="it does not simulate a reverse process")
        chosen.check_supported(self.head)
        self.sampler = chosen
        if not torch.equal(*(self._plan(2, torch.tensor([4]), seed).t for seed in (0, 1))):
            hint = "use m2s.sample, or sampler='ancestral'"
            raise UserTypeError(option="sampler", value=sampler, reason="the times of its steps are random", hint=hint)
        self._current: Plan | None = None
        self.set_timesteps(num_inference_steps)

    @classmethod
    def of(cls, head: Head, **options: Any) -> "M2SScheduler":
        """Build a scheduler from a head.

        Args:
            head: What the network's output means, with its process.
            options: Other arguments of the constructor.

        Returns:
            The scheduler.
        """
        return cls(head=to_dict(head), **options)

    def set_timesteps(
        self, num_inference_steps: int, device: str | torch.device | None = None, block_length: int | None = None
    ) -> None:
        """Set the number of calls of the network.

        A sampler with corrections needs several calls for one of its steps. It takes as many steps as the calls allow. A call
        of `step` after the last one returns the sample as it is.

        Args:
            num_inference_steps: Calls of the network.
            device: Where `timesteps` is put.
            block_length: Tokens of a block.

        Raises:
            UserError: The sampler needs more calls.
        """
        validation.positive_int("num_inference_steps", num_inference_steps)
        free = torch.tensor([block_length or self.config.block_length])
        for steps in range(num_inference_steps, 0, -1):
            times = self._plan(steps, free).t
            if len(times) <= num_inference_steps:
                break
        else:
            reason = f"sampler {self.sampler.name!r} needs at least {len(times)} calls of the network"
            raise UserError(option="num_inference_steps", value=num_inference_steps, reason=reason)
        self.num_inference_steps, self._steps, self._current = num_inference_steps, steps, None
        self.timesteps = torch.arange(len(times), dtype=torch.long, device=device)
        self._times = times[:, 0].tolist()

    def network_time(self, timestep: int | Tensor, batch_size: int = 1, device: str | torch.device | None = None) -> Tensor:
        """Return the time that the network sees at a step, for networks that see one, [B].

        Args:
            timestep: An entry of `timesteps`.
            batch_size: B.
            device: Where it is put.
        """
        t_min = self.config.t_min
        return torch.full((batch_size,), min(max(self._times[int(timestep)], t_min), 1 - t_min), device=device)

    def sample_prior(self, shape: tuple[int, int], generator: torch.Generator | None = None) -> Int[Tensor, "B L"]:
        """Draw tokens from the reference distribution, with which sampling starts.

        Args:
            shape: (B, L).
            generator: A generator on the CPU.

        Returns:
            Tokens, [B, L].
        """
        u = self._noise(generator, shape, torch.device("cpu"), 0)("start")
        return draw_categorical(self.head.process.reference().to(u), u)

    def step(
        self,
        model_output: Float[Tensor, "B L V"],
        timestep: int | Tensor,
        sample: Int[Tensor, "B L"],
        *,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        mask_token_id: int | None = None,
        prompt_mask: Bool[Tensor, "*b L"] | None = None,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
        sampling_method: str = "multinomial",
        threshold: float | None = None,
        editing_threshold: float | None = None,
        minimal_topk: int | None = None,
    ) -> M2SSchedulerOutput | tuple[Tensor, ...]:
        """Take one step.

        Args:
            model_output: The network's output, [B, L, >= S].
            timestep: The number of the step, an entry of `timesteps`.
            sample: The current tokens, [B, L].
            temperature: Of the posterior; 0 takes the most likely token. `first_temperature` of the configuration replaces it.
            top_p: Keep the smallest set of tokens with this probability.
            top_k: Keep the `top_k` most likely tokens.
            mask_token_id: The id of the mask in the network's vocabulary. By default the last state of the process.
            prompt_mask: True at tokens that stay as they are, [L] or [B, L].
            generator: The source of the seed of this step. None: torch's global generator.
            return_dict: Return an `M2SSchedulerOutput`, otherwise a tuple of its first four fields.
            sampling_method: "greedy" takes the most likely token.
            threshold: Not used: the sampler decides which tokens change.
            editing_threshold: Not used.
            minimal_topk: Not used.

        Returns:
            The tokens after the step, and more.
        """
        index, temperatures, greedy = int(timestep), self._temperatures, sampling_method == "greedy"
        x, logits = from_pipeline(self.head.process, sample, model_output, mask_token_id)
        free = None if prompt_mask is None else ~prompt_mask.to(x.device).expand(x.shape)
        noise = self._noise(generator, x.shape, x.device, index + 1)
        plan = self._plan_at(index, x, free, noise)
        processor = temperatures.processor(self.head, index, 0.0 if greedy else temperature, top_k, top_p)
        if index < len(plan.t):
            move = Move(plan.t[index], plan.s[index], None if plan.reveal is None else plan.reveal[index])
            prediction = self._prediction(logits, x, move.t, processor, free)
            zero = move.s <= 0
            new = take_step(self.sampler, prediction, move, noise, (bool(zero.any()), bool(zero.all())))
            new = new if free is None else torch.where(free, new, x)
        else:
            new, prediction = x, self._prediction(logits, x, torch.full_like(plan.t[-1], self.config.t_min), processor, free)
        changed, masked = new != x, prediction.masked
        known = self.head.has_posterior
        probability = prediction.probability(new) if known else torch.full(x.shape, torch.nan, device=x.device)
        tokens, shaped = to_pipeline(self.head.process, new, mask_token_id), temperatures.scaled(model_output, index)
        if not return_dict:
            return tokens, tokens, probability, shaped
        return M2SSchedulerOutput(tokens, tokens, probability, shaped, changed, changed & ~masked)

    def step_correct(
        self,
        model_output: Float[Tensor, "B L V"],
        timestep: int | Tensor,
        sample: Int[Tensor, "B L"],
        *,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> M2SSchedulerOutput | tuple[Tensor, ...]:
        """Take one Gibbs move at the end time of a step: `corrector_k` sites are drawn given all others.

        Args:
            model_output: The network's output at `sample`, [B, L, >= S].
            timestep: The number of the step that was taken before.
            sample: The current tokens, [B, L].
            generator: The source of the seed. None: torch's global generator.
            return_dict: Return an `M2SSchedulerOutput`, otherwise a tuple of its first four fields.

        Returns:
            The tokens after the move, and more.
        """
        x, config = sample.long(), self.config
        noise = self._noise(generator, x.shape, x.device, int(timestep) + 1)
        plan = self._plan_at(int(timestep), x, None, noise)
        prediction = self._prediction(model_output, x, plan.s[int(timestep)], LogitsProcessor(), None)
        order, selection = None, CHOICES[config.corrector_selection]
        if selection is not None:
            assert selection in SELECTIONS
            ranked = Informed(selection=selection, selection_temperature=config.corrector_selection_tau)  # type: ignore[arg-type]
            order = ranked.order(prediction, noise)
        new = gibbs(prediction, config.corrector_k, noise, order)
        known = self.head.has_posterior
        probability = prediction.probability(new) if known else torch.full(x.shape, torch.nan, device=x.device)
        if not return_dict:
            return new, new, probability, model_output
        return M2SSchedulerOutput(new, new, probability, model_output, new != x, new != x)

    def check_eos_finished(
        self,
        cur_x: Int[Tensor, "B N"],
        sampled_tokens: Tensor,
        final_transfer: Tensor,
        finished: Bool[Tensor, "B"],
        eos_token_id: int,
        mask_token_id: int,
        prompt_length: int,
    ) -> Bool[Tensor, "B"]:
        """Return which sequences have an end-of-text token with no mask before it, [B]. `LLaDA2Pipeline` calls it.

        Args:
            cur_x: All tokens, [B, N].
            sampled_tokens: Not used.
            final_transfer: Not used.
            finished: Those that were finished before, [B].
            eos_token_id: The end-of-text token.
            mask_token_id: The mask.
            prompt_length: Tokens of the prompt, which do not count.
        """
        generated = cur_x[:, prompt_length:]
        complete = (generated == mask_token_id).cumsum(-1) == 0
        return finished | ((generated == eos_token_id) & complete).any(-1)

    def check_block_should_continue(
        self, step_idx: int, masks_remaining: bool | Tensor, finished: Bool[Tensor, "B"], **states: Any
    ) -> bool:
        """Return whether a block needs further steps: steps and masks remain. `LLaDA2Pipeline` calls it.

        Args:
            step_idx: The number of the next step.
            masks_remaining: Whether the block had masks before the last step.
            finished: The sequences that are finished, [B].
            states: Other states of the pipeline, which are not used.
        """
        return step_idx < len(self.timesteps) and bool(masks_remaining) and not bool(finished.all())

    # ---------------------------------------------------------------------------------------------------------------- private

    def _plan(self, steps: int, free: Tensor, seed: int = 0) -> Plan:
        """The plan of the sampler for samples with some numbers of free sites."""
        noise = CounterNoise(seed, torch.arange(len(free), device=free.device), 1, 0)
        return make_plan(self.sampler, steps, self.config.grid, free, self.head, noise, self.config.t_min)

    def _plan_at(self, index: int, x: Tensor, free: Tensor | None, noise: CounterNoise) -> Plan:
        """The plan of the samples of a pipeline: made at their first step."""
        if index == 0 or self._current is None or self._current.t.shape[1] != len(x):
            counts = torch.full((len(x),), x.shape[1], device=x.device) if free is None else free.sum(-1)
            self._current = self._plan(self._steps, counts)
        return self._current

    def _prediction(self, output: Tensor, x: Tensor, t: Tensor, processor: LogitsProcessor, free: Tensor | None) -> Prediction:
        """The prediction at the time of a step."""
        excludes = self.sampler.excludes_t_one or self.head.excludes_t_one
        return Prediction(self.head, output, x, t.clamp(max=1 - self.config.t_min) if excludes else t, processor, None, free)

    @property
    def _temperatures(self) -> Temperatures:
        """The temperature of each step."""
        config = self.config
        return Temperatures(config.first_temperature, config.last_temperature, self.num_inference_steps, config.on)

    def _noise(self, generator: torch.Generator | None, shape: Any, device: torch.device, step: int) -> CounterNoise:
        """The uniforms of a step: a function of a seed that is drawn from the generator, and of sample and site."""
        seed = draw_seed() if generator is None else _seed_of(generator)
        return CounterNoise(seed, torch.arange(shape[0], device=device), shape[1], step)


def _seed_of(generator: torch.Generator) -> int:
    """A seed that is drawn from a generator."""
    return int(torch.randint(2**53, (), generator=generator, device=generator.device))
