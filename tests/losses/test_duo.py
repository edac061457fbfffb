"""DUO's curriculum: the operator T against quadrature, a closed form and simulation; the relaxed loss against UDLM's."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import log_ndtr
from scipy.stats import chisquare, kstest
from test_resume import die_before

import m2s
from m2s.distributed import World
from m2s.errors import UserError
from m2s.losses import Relaxed, udlm
from m2s.losses.duo import gaussian_latent, gaussian_to_uniform, signal_to_noise, soft_embedding, temperature
from m2s.losses.noise import corrupt_by_counter, normals_by_counter
from m2s.losses.objective import TrainingObjective
from m2s.models import DiT, DiTConfig
from m2s.training import train
from m2s.training.build import make_objects
from m2s.training.config import resolve
from m2s.training.trainer import Trainer
from small_runs import losses, outcome, random_rows, small, together

K, L = 5, 6
PROCESS = m2s.Uniform(K, m2s.LogLinear())


def network(seed: int = 0, states: int = K) -> DiT:
    """A small network in float64 without zero weights."""
    torch.manual_seed(seed)
    model = DiT(DiTConfig(states, width=16, depth=1, heads=2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def noise(seed: int, rows: int) -> torch.Tensor:
    """The noise that `Relaxed` draws with this seed."""
    return torch.randn(rows, L, K, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def _in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("vocab", [2, 3, 27, 256, 50_257])
def test_operator_agrees_with_quadrature(vocab: int) -> None:
    ratios = [0.01, 0.5, 2.0, 4.0, 7.0]
    alpha, beta = gaussian_to_uniform(torch.tensor(ratios, dtype=torch.float64), vocab)
    for number, r in enumerate(ratios):

        def kept(v: float, r: float = r) -> float:
            return math.exp(-(v**2) / 2 + (vocab - 1) * log_ndtr(v + r)) / math.sqrt(2 * math.pi)

        probability = sum(quad(kept, low, low + 2, epsabs=0, epsrel=1e-12)[0] for low in range(-10, 10, 2))
        wanted = (vocab * probability - 1) / (vocab - 1)
        assert float(alpha[number]) == pytest.approx(wanted, rel=1e-9, abs=1e-14)
        assert float(beta[number]) == pytest.approx(1 - wanted, rel=1e-9, abs=1e-14)


def test_operator_for_two_tokens_has_a_closed_form() -> None:
    """alpha = erf(r / 2), and 1 - alpha = erfc(r / 2) keeps its relative accuracy where it is small."""
    r = torch.logspace(-4, 1, 40, dtype=torch.float64)
    alpha, beta = gaussian_to_uniform(r, 2)
    torch.testing.assert_close(alpha, torch.erf(r / 2), rtol=1e-11, atol=0)
    torch.testing.assert_close(beta, torch.erfc(r / 2), rtol=1e-11, atol=0)


def test_operator_agrees_with_simulation() -> None:
    rng, count = np.random.default_rng(0), 200_000
    for vocab, r in ((3, 0.7), (10, 1.5), (40, 3.0)):
        w = rng.normal(size=(count, vocab))
        w[:, 0] += r
        same = (w.argmax(-1) == 0).mean()
        alpha = float(gaussian_to_uniform(torch.tensor(r), vocab)[0])
        probability = alpha + (1 - alpha) / vocab
        assert abs(same - probability) < 4 * math.sqrt(probability * (1 - probability) / count)


@pytest.mark.parametrize("vocab", [2, 17, 50_257])
def test_inverse_of_the_operator(vocab: int) -> None:
    t = torch.tensor([1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999, 1 - 1e-6], dtype=torch.float64)
    r = signal_to_noise(1 - t, t, vocab)
    assert (r.diff() < 0).all()
    alpha, beta = gaussian_to_uniform(r, vocab)
    torch.testing.assert_close(alpha, 1 - t, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(beta, t, rtol=1e-9, atol=1e-13)


def test_argmax_has_the_distribution_of_the_process() -> None:
    rng, count = torch.Generator().manual_seed(0), 20_000
    for t in (0.1, 0.6, 0.95):
        time, x_0 = torch.full((count,), t, dtype=torch.float64), torch.full((count, 1), 3)
        w = gaussian_latent(PROCESS, x_0.T, time[:1], torch.randn(1, count, K, generator=rng))[0].double()
        x_t = w.argmax(-1)
        # a and sqrt(1 - a^2), whose ratio T turns into alpha
        signal, noise = float(w[:, 3].mean()), float(w[:, :3].std())
        assert signal**2 + noise**2 == pytest.approx(1, abs=0.03)
        kept = float(gaussian_to_uniform(torch.tensor(signal / noise, dtype=torch.float64), K)[0])
        assert kept == pytest.approx(float(PROCESS.alpha(time[0])), abs=0.02)
        wanted = count * PROCESS.rows(x_0[:1], time[:1])[0, 0].numpy()
        assert chisquare(np.bincount(x_t.flatten().numpy(), minlength=K), wanted).pvalue > 1e-4


@pytest.mark.usefixtures("_in_float64")
@pytest.mark.parametrize("tau", [0.0, 1e-9])
def test_low_temperature_gives_the_loss_of_udlm(tau: float) -> None:
    """Value and gradient equal those of UDLM's loss at x_t, the argmax, because the softmax is one-hot."""
    model, head = network(), m2s.Posterior(PROCESS, "exact")
    x_0, t = torch.randint(K, (4, L), generator=torch.Generator().manual_seed(1)), torch.tensor([0.05, 0.4, 0.7, 0.97])
    found = Relaxed(model, head, udlm, generator=torch.Generator().manual_seed(2))(x_0, t, tau)
    x_t = gaussian_latent(PROCESS, x_0, t, noise(2, 4)).argmax(-1)
    assert (x_t != x_0).any() and (x_t == x_0).any()
    wanted = udlm(head, model(x_t, t), x_0, x_t, t)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(m2s.score_entropy(head, model(x_t, t), x_0, x_t, t), wanted, rtol=1e-10, atol=1e-12)
    slopes = [torch.autograd.grad(value.sum(), list(model.parameters())) for value in (found, wanted)]
    for one, two in zip(*slopes, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("_in_float64")
def test_network_input_is_the_mean_embedding() -> None:
    """Against a network whose embedding holds the weighted means. At high temperature the input is the uniform mean."""
    model, head = network(3), m2s.Posterior(PROCESS, "exact")
    x_0, t = torch.tensor([[0, 1, 2, 3, 4, 0]]), torch.tensor([0.6])
    w = gaussian_latent(PROCESS, x_0, t, noise(5, 1))
    distribution = torch.softmax(w / 0.3, -1)
    # One token per site, whose embedding is the mean of that site.
    other = network(3, L)
    with torch.no_grad():
        other.embedding.weight[:L] = distribution[0] @ model.embedding.weight[:K]
    wanted = other(torch.arange(L).unsqueeze(0), t)
    with soft_embedding(model.embedding, distribution):
        found = model(torch.zeros(1, L, dtype=torch.long), t)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    loss = Relaxed(model, head, udlm, generator=torch.Generator().manual_seed(5))(x_0, t, 0.3)
    torch.testing.assert_close(loss, udlm(head, found, x_0, w.argmax(-1), t), rtol=1e-10, atol=1e-12)
    with soft_embedding(model.embedding, torch.softmax(w / 1e12, -1)):
        uniform = model(x_0, t)
    with soft_embedding(model.embedding, torch.full((1, L, K), 1 / K)):
        torch.testing.assert_close(uniform, model(x_0, t), rtol=1e-9, atol=1e-9)


def test_embedding_is_restored_after_an_error() -> None:
    model = network()
    before = model.embedding(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="in between"), soft_embedding(model.embedding, torch.full((1, 1, K), 0.2)):
        raise RuntimeError("in between")
    assert torch.equal(model.embedding(torch.tensor([1])), before)


def test_temperature_decreases_from_start_to_end() -> None:
    assert [temperature(step, 100, 200) for step in (0, 100)] == [0.1, 0.1]
    assert temperature(150, 100, 200) == pytest.approx(math.sqrt(0.1 * 0.01))
    assert temperature(199, 100, 200) > 0.01 and temperature(200, 100, 200) == temperature(10**9, 100, 200) == 0
    assert temperature(0, 0, 0) == 0
    for wrong in ({"first": 0.01, "last": 0.1}, {"last": 0.0}, {"start": 300}):
        with pytest.raises(ValueError, match="tau falls"):
            temperature(**{"step": 1, "start": 100, "end": 200, **wrong})


def test_training_with_decreasing_temperature_lowers_the_nelbo() -> None:
    """On two constant sequences. At the end the NELBO is below that of any network that ignores its input."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(K, width=16, depth=1, heads=2))
    head, x_0 = m2s.Posterior(PROCESS, "exact"), torch.tensor([[1], [3]]).repeat(8, L)
    objective, rng = Relaxed(model, head), torch.Generator().manual_seed(0)
    before = m2s.elbo(model, head, x_0, passes=4, generator=rng).mean()[0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(150):
        t = m2s.stratified_times(16, 1e-3, 1 - 1e-3, rng)
        optimizer.zero_grad()
        objective(x_0, t, temperature(step, 30, 100)).sum(-1).mean().backward()
        optimizer.step()
    after = m2s.elbo(model, head, x_0, passes=4, generator=rng).mean()[0]
    assert after < 0.5 * L * math.log(2) < before


def test_unsupported_heads_networks_and_temperatures_raise() -> None:
    model, head = network(), m2s.Posterior(PROCESS)
    for wrong in (m2s.LogScore(PROCESS), m2s.Posterior(m2s.Absorbing(K, m2s.Linear()))):
        with pytest.raises(TypeError, match=r"is for m2s\.Posterior over m2s\.Uniform"):
            Relaxed(model, wrong)
    with pytest.raises(TypeError, match="which Linear does not have"):
        Relaxed(torch.nn.Linear(2, 2), head)
    with pytest.raises(ValueError, match="t_min"):
        Relaxed(model, head, t_min=0.5)
    x_0, t = torch.zeros(1, L, dtype=torch.long), torch.tensor([0.5])
    for tau in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tau is"):
            Relaxed(model, head)(x_0, t, tau)
    with pytest.raises(ValueError, match="vocab"):
        gaussian_to_uniform(t, 1)
    with pytest.raises(ValueError, match="negative"):
        gaussian_to_uniform(-t, 3)


# --- in the trainer ---------------------------------------------------------------------------------------------------------

DUO = {"method": "duo", "network__dropout": 0.0, "log_every": 1}


def test_normals_depend_on_example_step_and_token_only() -> None:
    rows = torch.arange(64)
    z = normals_by_counter(rows, 7, 5, 3, 2)
    assert z.shape == (64, 7, 5) and z.dtype == torch.float32 and z.isfinite().all()
    assert kstest(z.flatten().double().numpy(), "norm").pvalue > 1e-3
    assert torch.equal(normals_by_counter(rows[40:], 7, 5, 3, torch.tensor(2)), z[40:])
    assert len(z.unique()) > 0.999 * z.numel() and not torch.equal(normals_by_counter(rows, 7, 5, 3, 3), z)


@pytest.mark.parametrize("network", ["dit", "unet"])
def test_trainer_relaxes_tokens_in_the_first_half_of_training(tmp_path, network) -> None:
    """The loss of a relaxed and of a plain training step equals one computed from the same noise."""
    changes: dict[str, object] = dict(DUO)
    if network == "unet":
        changes |= {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__multipliers": (1, 2)}
    source = random_rows(vocab=K)
    source.shape = (2, 2)
    for step, steps, tau in ((0, 8, 0.1), (0, 1, 0.0)):
        config = resolve(small(tmp_path / f"{steps}", steps=steps, validate_every=0, **changes))
        model, head, _ = make_objects(config, source)
        trainer = Trainer(config, source, World.start("cpu"), model, head, {})
        assert trainer.tau == pytest.approx(tau)
        local = trainer.local_batch(step)
        found = trainer.gradient(local)[0]
        x_0, seed = local.batch.x_0.long(), config.run.seed
        if tau:
            w = gaussian_latent(head.process, x_0, local.t, normals_by_counter(local.rows, x_0.shape[1], K, seed, step))
            x_t, distribution = w.argmax(-1), torch.softmax(w / tau, -1)
        else:
            x_t = corrupt_by_counter(head.process, x_0, local.t, local.rows, seed, step)
            distribution = torch.nn.functional.one_hot(x_t, K).float()
        rows = (distribution @ model.embedding.weight[:K]).reshape(-1, model.embedding.embedding_dim)
        table = torch.nn.Embedding(len(rows), rows.shape[1], _weight=rows.detach())
        other = copy.deepcopy(model)
        other.embedding = table  # one token per site
        sites = torch.arange(len(rows)).reshape(x_0.shape)
        object.__setattr__(other.config, "states", len(rows))
        output = other(sites, local.t.float())[..., :K]
        wanted = m2s.score_entropy(head, output, x_0, x_t, local.t).double().sum(-1) * local.weight
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)


def test_run_logs_the_temperature_and_resumes_bit_for_bit(tmp_path) -> None:
    for step in (3, 6, 9):
        die_before(step, small(tmp_path / f"{step}", **DUO), random_rows())
        train(small(tmp_path / f"{step}", **DUO), random_rows())
    outcomes = [outcome(tmp_path / f"{step}") for step in (3, 6, 9)]
    train(small(tmp_path / "uninterrupted", **DUO), random_rows())
    assert all(found == outcome(tmp_path / "uninterrupted") for found in outcomes)
    taus = [line["tau"] for line in outcomes[0]["log"] if "tau" in line]
    assert len(taus) == 12 and taus[0] < 0.1 and all(a > b for a, b in itertools.pairwise(taus[:5])) and taus[6:] == [0.0] * 6


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(tmp_path, parallel) -> None:
    changes = {**DUO, "steps": 6, "micro_batch": None}
    train(small(tmp_path / "one", **changes), random_rows())
    together(2, small(tmp_path / "two", parallel=parallel, **changes), random_rows())
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "md4"}, r"is for m2s\.Posterior .*--head\.kind posterior.* over m2s\.Uniform"),
        ({"method": "sedd"}, r"is for m2s\.Posterior .*--head\.kind posterior.* over m2s\.Uniform"),
        (
            {
                "network__kind": "unet",
                "network__input": "level",
                "network__depth": None,
                "network__heads": None,
                "network__multipliers": (1, 2),
            },
            "which UNet does not have",
        ),
    ],
)
def test_curriculum_is_rejected_without_uniform_noise_or_embedding(tmp_path, changes, word) -> None:
    source = random_rows()
    source.shape = (2, 2)
    with pytest.raises(UserError, match=r"head\.curriculum is 'duo', but .*" + word):
        train(small(tmp_path / "run", **{**DUO, "head__curriculum": "duo", **changes}), source)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("t_min", [0.0, 0.5, -0.1])
def test_every_objective_checks_its_times_alike(t_min: float) -> None:
    model, head = DiT(DiTConfig(5, width=8, depth=1, heads=1)), m2s.Posterior(m2s.Uniform(5, m2s.Linear()))
    messages = set()
    for make in (m2s.Objective, Relaxed, TrainingObjective):
        with pytest.raises(ValueError, match="t_min") as error:
            make(model, head, m2s.score_entropy, t_min)
        messages.add(str(error.value))
    assert len(messages) == 1
    t = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    seen = [make(model, head, m2s.score_entropy, 0.1).network_time(t) for make in (m2s.Objective, Relaxed, TrainingObjective)]
    assert all(torch.equal(each, torch.tensor([0.1, 0.3, 0.9])) for each in seen)
