"""`M2SScheduler` against diffusers' own schedulers, by exact one-step probabilities of both, and inside its pipelines."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import exact_steps
import m2s
from exact_steps import GivenNoise, tensor
from m2s.errors import UserError
from m2s.samplers import SAMPLERS

diffusers = pytest.importorskip("diffusers", minversion="0.42")
from m2s.hub.diffusers import M2SScheduler, from_diffusers  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_shape_hook")
K, STEPS = 4, 5
LOGITS = torch.from_numpy(np.random.default_rng(0).normal(size=(K, 1, K)) * 1.5).float()
EVERY_TOKEN = torch.arange(K).unsqueeze(-1)  # [K, 1]: one sample for each current token


class Scripted:
    """torch.multinomial and torch.randint with given outcomes. The probabilities that were passed are recorded."""

    def __init__(self, *outcomes: int) -> None:
        self.outcomes, self.given = list(outcomes), []

    def multinomial(self, probabilities: torch.Tensor, num_samples: int, generator: Any = None) -> torch.Tensor:
        self.given.append(probabilities / probabilities.sum(-1, keepdim=True))
        return torch.full((len(probabilities), 1), self.outcomes[len(self.given) - 1])

    def randint(self, low: int = 0, high: int = 0, size: Any = (), **more: Any) -> torch.Tensor:
        return torch.full(tuple(size), self.outcomes[-1])


def theirs(call: Callable[[], torch.Tensor], draws: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The exact distribution of the next token of diffusers' code, [K, K], by running it on every outcome of its draws."""
    found = np.zeros((K, K))
    choices = [range(K), range(3)][:draws]  # the clean token, and then one of three routes
    for outcome in itertools.product(*choices, range(K)):
        script = Scripted(*outcome)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", script.multinomial)
            patch.setattr(torch, "randint", script.randint)
            new = call().squeeze(-1).numpy()
        weight = np.ones(K) / K  # of the uniformly random token
        for probabilities, value in zip(script.given, outcome, strict=False):
            weight = weight * probabilities[:, value].numpy()
        np.add.at(found, (np.arange(K), new), weight)
    return found


def ours(
    scheduler: M2SScheduler,
    call: Callable[[torch.Tensor, torch.Tensor], Any],
    purposes: tuple[str, ...],
    fixed: dict | None = None,
) -> np.ndarray:
    """The exact distribution of the next token, by integrating over the uniforms of the step."""

    def outcome(rows: np.ndarray, u: dict) -> np.ndarray:
        given = GivenNoise({name: tensor(value[:, None]) for name, value in ((fixed or {}) | u).items() if name in u})
        given.each |= {name: torch.full((len(rows), 1), value) for name, value in (fixed or {}).items()}
        scheduler._noise = lambda *_: given
        return call(LOGITS[rows], EVERY_TOKEN[rows]).prev_sample.squeeze(-1).numpy()

    return exact_steps.exact_distribution(outcome, K, K, purposes)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("step", [0, 2, STEPS - 1])
def test_the_step_of_discrete_ddim(step: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All current tokens, the first, a middle and the last step: equal probabilities to 1e-6."""
    peer = diffusers.DiscreteDDIMScheduler(num_inference_steps=STEPS)
    scheduler = from_diffusers(peer, K)
    assert scheduler.sampler.name == "bayes" and len(scheduler.timesteps) == STEPS

    def call() -> torch.Tensor:
        return peer.step(LOGITS, step, EVERY_TOKEN, temperature=temperature).prev_sample

    draws = 1 if temperature == 0 else 2
    if draws == 1:  # the token is the most likely one: only the route is drawn
        wanted = np.zeros((K, K))
        for route, y in itertools.product(range(3), range(K)):
            script = Scripted(route, y)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "multinomial", script.multinomial)
                patch.setattr(torch, "randint", script.randint)
                new = call().squeeze(-1).numpy()
            np.add.at(wanted, (np.arange(K), new), script.given[0][:, route].numpy() / K)
    else:
        wanted = theirs(call, draws, monkeypatch)
    found = ours(scheduler, lambda out, x: scheduler.step(out, step, x, temperature=temperature), ("route", "token", "jump"))
    np.testing.assert_allclose(wanted.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("step", [0, 2])
def test_the_corrector_of_discrete_ddim(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of the site that is drawn again."""
    peer = diffusers.DiscreteDDIMScheduler(STEPS, corrector_steps=1, corrector_selection="random")
    scheduler = from_diffusers(peer, K)
    found = ours(scheduler, lambda out, x: scheduler.step_correct(out, step, x), ("token",), {"order": 0.5})
    wanted = np.zeros((K, K))
    for y in range(K):
        script = Scripted(y)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", script.multinomial)
            new = peer.step_correct(LOGITS, step, EVERY_TOKEN).prev_sample.squeeze(-1).numpy()
        np.add.at(wanted, (np.arange(K), new), script.given[0][:, y].numpy())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_leave_one_out_tempering(temperature: float) -> None:
    """The leave-one-out distribution nu is sharpened, and not the posterior: mu' = nu^(1/T) P_t(k|.), then the Bayes step."""
    head, step = m2s.Posterior(m2s.Uniform(K, m2s.Linear())), 2
    scheduler = M2SScheduler.of(head, sampler="bayes", num_inference_steps=STEPS, on="leave_one_out")
    found = ours(scheduler, lambda out, x: scheduler.step(out, step, x, temperature=temperature), ("route", "token", "jump"))
    t, s, one = 1 - step / STEPS, 1 - (step + 1) / STEPS, np.eye(K)
    at_t, at_s = ((1 - time) * one + time / K for time in (t, s))  # alpha = 1 - t
    between = (1 - t) / (1 - s) * one + (1 - (1 - t) / (1 - s)) / K  # from y at s to k at t
    mu = np.exp(LOGITS[:, 0].double().numpy())  # row k: the network's output at the token k
    nu = (mu / at_t.T) ** (1 / temperature)
    sharpened = nu * at_t.T
    sharpened /= sharpened.sum(1, keepdims=True)
    bridge = at_s[None] * between.T[:, None] / at_t.T[..., None]  # [k, z, y]
    np.testing.assert_allclose(found, np.einsum("kz,kzy->ky", sharpened, bridge), rtol=0, atol=1e-6)
    plain = M2SScheduler.of(head, sampler="bayes", num_inference_steps=STEPS)
    other = ours(plain, lambda out, x: plain.step(out, step, x, temperature=temperature), ("route", "token", "jump"))
    assert abs(found - other).max() > 0.01


@pytest.mark.parametrize("selection", ["lowest_log_margin", "lowest_current_prob", "lowest_maxprob"])
def test_the_sites_that_the_corrector_chooses(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same uniforms both choose the same sites."""
    rng, length = np.random.default_rng(1), 6
    logits, x = torch.from_numpy(rng.normal(size=(40, length, K))).float(), torch.from_numpy(rng.integers(K, size=(40, length)))
    u = torch.from_numpy(rng.random((40, length)))
    peer = diffusers.DiscreteDDIMScheduler(STEPS, 1, 2, selection, 0.7)
    scheduler = from_diffusers(peer, K)
    chosen: list[torch.Tensor] = []

    def multinomial(probabilities: torch.Tensor, num_samples: int, generator: Any = None) -> torch.Tensor:
        return torch.zeros(len(probabilities), 1, dtype=torch.long)

    select = peer._select_positions
    monkeypatch.setattr(peer, "_select_positions", lambda *given: chosen.append(select(*given)) or chosen[-1])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        patch.setattr(torch, "rand", lambda *_, **__: u.clone())
        peer.step_correct(logits, 2, x)
    mark = K - 1  # a uniform number just below one draws the last token, unless its probability rounds to zero
    scheduler._noise = lambda *_: GivenNoise({"order": u, "token": torch.full(x.shape, 1 - 1e-12, dtype=torch.float64)})
    new = scheduler.step_correct(logits, 2, x).prev_sample
    wanted = torch.zeros_like(x, dtype=torch.bool).scatter(1, chosen[0], True)
    assert torch.equal(new, torch.where(wanted, mark, x))
    assert (wanted.sum(1) == 2).all()


@pytest.mark.parametrize("step", [0, 3])
def test_the_step_of_entropy_bound(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted sites, and the distributions of the drawn tokens and of the noise, with the annealed temperature."""
    rng, length = np.random.default_rng(2), 5
    logits = torch.from_numpy(rng.normal(size=(30, length, K)) * 2).float()
    x = torch.from_numpy(rng.integers(K, size=(30, length)))
    peer = diffusers.EntropyBoundScheduler(entropy_bound=1.1, num_inference_steps=STEPS)
    scheduler = from_diffusers(peer, K)
    accepted = peer.step(logits, step, x).accepted_index
    assert 1 < accepted.float().sum(1).mean() < length
    token, jump = (torch.from_numpy(rng.random((30, length))) for _ in range(2))
    scheduler._noise = lambda *_: GivenNoise({"token": token, "jump": jump, "site": torch.zeros(30, length)})
    new = scheduler.step(logits, step, x).prev_sample.numpy()
    script = Scripted(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", script.multinomial)
        peer.step(logits, step, x)
    drawn = (script.given[0].double().cumsum(-1).reshape(30, length, K) <= token[..., None]).sum(-1).numpy()
    noise = np.floor(jump.numpy() * K).astype(int)
    np.testing.assert_array_equal(new, np.where(accepted.numpy(), drawn, noise))
    # What a pipeline gives to a network with self-conditioning, and asks whether it is finished.
    asked = (logits, step, x)
    torch.testing.assert_close(scheduler.step(*asked).pred_logits, peer.step(*asked).pred_logits)
    torch.testing.assert_close(scheduler.step(*asked, return_dict=False)[3], peer.step(*asked, return_dict=False)[4])
    plain = diffusers.DiscreteDDIMScheduler(STEPS)
    assert torch.equal(from_diffusers(plain, K).step(*asked, temperature=0.5).pred_logits, plain.step(*asked).pred_logits)


def test_the_configuration_is_saved_and_loaded(tmp_path: Path) -> None:
    head = m2s.Posterior(m2s.Absorbing(7, m2s.Cosine()), offset="exact")
    options = {"sampler": "remasking", "sampler_options": {"strength": 0.3}, "grid": "cosine", "num_inference_steps": 9}
    M2SScheduler.of(head, **options).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert stored["_class_name"] == "M2SScheduler" and stored["head"]["process"]["kind"] == "Absorbing"
    for found in (M2SScheduler.from_pretrained(tmp_path), M2SScheduler.from_config(stored)):
        assert str(found.head) == str(head) and found.sampler == m2s.samplers.Remasking(0.3)
        assert found.config.grid == "cosine" and len(found.timesteps) == 9


def loop(scheduler: M2SScheduler, model: Callable, shape: tuple[int, int], steps: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scheduler.set_timesteps(steps)
    x = scheduler.sample_prior(shape, generator)
    for timestep in scheduler.timesteps:
        x = scheduler.step(model(x, scheduler.network_time(timestep, len(x))), timestep, x, generator=generator).prev_sample
    return x


PATTERN = torch.tensor([2, 0, 3, 1, 2, 2])


@pytest.mark.parametrize(
    "name", [name for name in SAMPLERS if name not in ("autoregressive", "first_hitting", "self_correcting")]
)
def test_every_sampler_in_the_loop_of_a_pipeline(name: str) -> None:
    """A perfect network of one sequence gives that sequence, with every sampler, in the given number of calls."""
    process = next(
        process
        for process in (m2s.Uniform(K, m2s.Linear()), m2s.Absorbing(K, m2s.Linear()))
        if _supports(name, m2s.Posterior(process))
    )
    calls = []

    def model(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        calls.append(float(t[0]))
        return torch.nn.functional.one_hot(PATTERN, process.states).double().log().clamp(min=-1e4).expand(len(x), -1, -1)

    found = loop(M2SScheduler.of(m2s.Posterior(process), sampler=name, block_length=6), model, (3, 6), 7)
    assert torch.equal(found, PATTERN.expand(3, -1))
    assert 6 <= len(calls) <= 7 and calls[0] == pytest.approx(0.999) and calls == sorted(calls, reverse=True)


def _supports(name: str, head: m2s.Head) -> bool:
    try:
        SAMPLERS[name]().check_supported(head)
    except TypeError:
        return False
    return True


def test_samples_depend_on_the_generator_only() -> None:
    head = m2s.Posterior(m2s.Uniform(K, m2s.Linear()))

    def model(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((x + 1) % K, K).float()

    one, two, other = (loop(M2SScheduler.of(head), model, (5, 8), 6, seed) for seed in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    # A sample does not depend on how many others are drawn with it.
    assert torch.equal(loop(M2SScheduler.of(head), model, (2, 8), 6), one[:2])


def test_prompts_stay_and_masks_may_have_any_id() -> None:
    """The mask has id 1 in the network's vocabulary: tokens and logits are converted, and back."""
    network_mask, process = 1, m2s.Absorbing(K, m2s.Linear())
    scheduler = M2SScheduler.of(m2s.Posterior(process), sampler="ancestral", num_inference_steps=1)
    wanted = torch.tensor([[3, 0, 4, 2]])  # ids of a network with K + 1 ids, without the mask
    logits = torch.nn.functional.one_hot(wanted, K + 1).double().log().clamp(min=-1e4)
    x = torch.tensor([[3, network_mask, network_mask, 0]])
    kept = torch.tensor([False, False, False, True])
    out = scheduler.step(logits, 0, x, mask_token_id=network_mask, prompt_mask=kept)
    assert out.prev_sample.tolist() == [[3, 0, 4, 0]] and out.transfer_index.tolist() == [[False, True, True, False]]
    assert not out.editing_transfer_index.any() and scheduler.step(logits, 0, x, mask_token_id=1, return_dict=False)[
        0
    ].shape == (1, 4)


class Denoiser(torch.nn.Module):
    """A network of a pipeline: it knows one sequence of tokens."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.weight, self.states, self.device = torch.nn.Parameter(torch.zeros(1)), states, torch.device("cpu")

    def forward(self, x: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        places = torch.arange(x.shape[1]) if position_ids is None else position_ids
        logits = torch.nn.functional.one_hot((places * 2) % K, self.states).float() * 50
        return SimpleNamespace(logits=logits.expand(*x.shape, -1) + self.weight)


@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "entropy_bound"])
def test_in_the_pipeline_of_llada(sampler: str) -> None:
    """Blocks of 4 tokens after a prompt of 3. diffusers' own scheduler gives the same tokens, since the network is certain."""
    scheduler = M2SScheduler.of(m2s.Posterior(m2s.Absorbing(K, m2s.Linear())), sampler=sampler, block_length=4)
    peer = diffusers.BlockRefinementScheduler(block_length=4)
    prompt, found = torch.tensor([[3, 3, 3]]), []
    for each in (scheduler, peer):
        pipe = diffusers.LLaDA2Pipeline(model=Denoiser(K + 1), scheduler=each)
        pipe.set_progress_bar_config(disable=True)
        asked = {"gen_length": 9, "num_inference_steps": 4, "mask_token_id": K, "output_type": "seq", "editing_threshold": None}
        found.append(pipe(input_ids=prompt, generator=torch.Generator().manual_seed(0), **asked).sequences)
    assert torch.equal(*found) and found[0].tolist() == [[(place * 2) % K for place in range(3, 12)]]


@pytest.fixture(scope="module")
def gemma() -> Any:
    """A random DiffusionGemma with a vocabulary of 32 and a canvas of 4 tokens."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        pytest.skip("this version of transformers has no DiffusionGemma")
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    text |= {"moe_intermediate_size": 8, "num_experts": 2, "top_k_experts": 1, "global_head_dim": 8}
    text |= {"num_global_key_value_heads": 1}
    torch.manual_seed(0)
    config = transformers.DiffusionGemmaConfig(text_config=text, canvas_length=4)
    return transformers.DiffusionGemmaForBlockDiffusion(config).eval()


class Processor:
    """Stands for a processor: a prompt is three tokens."""

    eos_token_id = None

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[5, 6, 7]])}


def generated(model: Any, scheduler: Any, steps: int, temperature: float, seed: int = 0) -> torch.Tensor:
    pipe = diffusers.DiffusionGemmaPipeline(model=model, scheduler=scheduler, processor=Processor())
    pipe.set_progress_bar_config(disable=True)
    asked = {"gen_length": 8, "num_inference_steps": steps, "temperature": temperature, "confidence_threshold": None}
    return pipe(prompt="any", generator=torch.Generator().manual_seed(seed), output_type="seq", **asked).sequences


def test_in_the_pipeline_of_diffusion_gemma(gemma: Any) -> None:
    """One greedy step from the same canvas is that of diffusers' scheduler. More steps, and corrections, run."""
    peer = diffusers.DiscreteDDIMScheduler()
    scheduler = from_diffusers(peer, 32)
    one = generated(gemma, scheduler, 1, 0.0)
    # The second canvas starts from random tokens that follow other draws of the generator.
    assert torch.equal(one[:, :4], generated(gemma, peer, 1, 0.0)[:, :4]) and one.shape == (1, 8)
    head = scheduler.head
    for options in ({}, {"sampler": "psi"}, {"sampler": "entropy_bound"}, {"corrector_steps": 2, "corrector_k": 2}):
        drawn = generated(gemma, M2SScheduler.of(head, **options), 5, 1.0)
        assert drawn.shape == (1, 8) and int(drawn.min()) >= 0 and int(drawn.max()) < 32
        assert torch.equal(drawn, generated(gemma, M2SScheduler.of(head, **options), 5, 1.0))


def test_their_network_and_scheduler_in_m2s(gemma: Any) -> None:
    """The converted head and sampler draw from the adapted network, with `m2s.sample` and its reproducible numbers."""
    same = from_diffusers({"_class_name": "DiscreteDDIMScheduler", "num_inference_steps": 3}, 32)
    adapted = m2s.from_transformers(gemma, same.head.process, same.head, prompt=torch.tensor([5, 6, 7]))
    asked = (same.head, (2, 4), same.num_inference_steps, same.sampler, same.config.grid)
    drawn = m2s.sample(adapted.model, *asked, seed=0, micro_batch=2)
    assert int(drawn.max()) < 32 and torch.equal(
        drawn[1:], m2s.sample(adapted.model, *asked[:1], (1, 4), *asked[2:], seed=0, start=1, micro_batch=2)
    )


def test_samplers_without_a_fixed_plan_are_errors() -> None:
    masks, head = m2s.Posterior(m2s.Absorbing(K, m2s.Linear())), m2s.Posterior(m2s.Uniform(K, m2s.Linear()))
    for given, options, message in (
        (masks, {"sampler": "first_hitting"}, "random"),
        (head, {"sampler": "autoregressive"}, "reverse process"),
        (head, {"sampler": "ancestral"}, "Absorbing"),
        (head, {"first_temperature": 1.0}, "both"),
        (head, {"corrector_selection": "best"}, "corrector_selection"),
        (head, {"sampler": "self_correcting", "num_inference_steps": 4}, "at least 129 calls"),
    ):
        with pytest.raises((UserError, TypeError), match=message):
            M2SScheduler.of(given, **options)
    with pytest.raises(TypeError, match="confidence"):
        from_diffusers(diffusers.BlockRefinementScheduler(), K)
    scheduler, logits = M2SScheduler.of(m2s.LogScore(m2s.Uniform(K, m2s.Linear()))), torch.zeros(1, 2, K)
    with pytest.raises(TypeError, match="Projected"):
        scheduler.step(logits, 0, torch.zeros(1, 2, dtype=torch.long), temperature=0.5)
    with pytest.raises(UserError, match="no mask"):
        M2SScheduler.of(head).step(logits, 0, torch.zeros(1, 2, dtype=torch.long), mask_token_id=3)


def test_m2s_does_not_import_diffusers() -> None:
    code = "import sys, m2s, m2s.hub, m2s.cli; assert 'diffusers' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
