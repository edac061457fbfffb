"""Capabilities of the processes: what each declares is what it can do."""

import pytest
import torch

import m2s
from m2s.heads import NextToken, Shifted
from m2s.process.chain import cosine_betas, even_betas
from m2s.samplers.capabilities import Need, has_capability
from oracle import CASES

CHAINS = {"chain-uniform": m2s.Chain.uniform(4, cosine_betas(10)), "chain-absorbing": m2s.Chain.absorbing(4, even_betas(10))}
PROCESSES = {name: case.process for name, case in CASES.items()} | CHAINS


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_is_of_one_family(name: str) -> None:
    process = PROCESSES[name]
    families = [process.rank_one, process.tabulated, process.chain]
    assert [family is process for family in families].count(True) == 1
    assert families.count(None) == 2


@pytest.mark.parametrize("name", PROCESSES)
def test_only_processes_in_continuous_time_have_rates(name: str) -> None:
    process, t = PROCESSES[name], torch.tensor([0.3, 0.7], dtype=torch.float64)
    assert process.has_rates == (process.chain is None)
    if process.has_rates:
        assert process.rates(t).shape == (2, process.states, process.states)
        return
    with pytest.raises(ValueError, match="a finite chain has no rates"):
        process.rates(t)
    with pytest.raises(ValueError, match="a finite chain has no rates"):
        process.rates_into(torch.zeros(2, 3, dtype=torch.long), t)


def test_next_token_prediction_has_no_matrices_and_no_rates() -> None:
    shifted = Shifted(5)
    assert not (shifted.has_transitions or shifted.has_rates)
    assert shifted.rank_one is shifted.tabulated is shifted.chain is None
    head = NextToken(shifted)
    needs = {need for need in Need if has_capability(head, need)}
    assert needs == {Need.POSTERIOR, Need.NEXT_TOKEN}


@pytest.mark.parametrize("head", [NextToken(Shifted(3)), *(m2s.Posterior(process) for process in PROCESSES.values())], ids=str)
def test_a_head_has_the_score_that_it_declares(head: m2s.Head) -> None:
    process, x_t, t = head.process, torch.zeros(2, 3, dtype=torch.long), torch.tensor([0.4, 0.7])
    output = torch.randn(2, 3, process.states)
    if head.has_score:
        assert head.log_score(output, x_t, t).shape == output.shape
    else:
        with pytest.raises(TypeError, match="has no score, because nothing is corrupted"):
            head.log_score(output, x_t, t)


@pytest.mark.parametrize("name", PROCESSES)
def test_mask(name: str) -> None:
    process = PROCESSES[name]
    x = torch.arange(process.states)
    assert process.is_mask(x).tolist() == [token == process.mask for token in range(process.states)]
    assert process.states == process.vocab + (process.mask is not None)


@pytest.mark.parametrize("name", PROCESSES)
def test_step_columns_are_those_of_the_step_matrix(name: str) -> None:
    process = PROCESSES[name]
    s, t = torch.tensor([0.2, 0.4], dtype=torch.float64), torch.tensor([0.3, 0.9], dtype=torch.float64)
    x_t = torch.arange(process.states).expand(2, -1)
    columns = process.step_columns(x_t, s, t)
    torch.testing.assert_close(columns, process.step_transition_matrix(s, t).transpose(-1, -2), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [m2s.Uniform, m2s.Absorbing])
def test_a_step_to_zero_removes_all_noise(make: type) -> None:
    """Under a schedule with sigma(0) > 0, a reverse step to s = 0 removes also the noise of t = 0."""
    process = make(4, m2s.Geometric(0.1, 5.0))
    x_t, t = torch.arange(process.states)[None], torch.tensor([0.6], dtype=torch.float64)
    columns = process.step_columns(x_t, torch.zeros_like(t), t)
    torch.testing.assert_close(columns, process.columns(x_t, t), rtol=1e-13, atol=0)
    assert (columns - process.step_transition_matrix(torch.zeros_like(t), t).transpose(-1, -2)).abs().max() > 1e-3


def test_a_pure_mask_leaves_unmasked_tokens_clean() -> None:
    assert m2s.Absorbing(4, m2s.Linear()).is_pure_mask and m2s.Hybrid(4, 0.0).is_pure_mask
    assert not m2s.Uniform(4, m2s.Linear()).is_pure_mask and not m2s.Hybrid(4, 0.2).is_pure_mask


@pytest.mark.parametrize("process", [m2s.Absorbing(4, m2s.Cosine()), m2s.Hybrid(4, 0.0)], ids=str)
def test_the_schedule_of_a_pure_mask_is_that_of_the_process(process: m2s.Absorbing | m2s.Hybrid) -> None:
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    schedule = process.masking_schedule
    torch.testing.assert_close(schedule.alpha(t), process.alpha(t), rtol=1e-15, atol=0)
    torch.testing.assert_close(schedule.beta(t), process.mixing(t).mask, rtol=1e-15, atol=0)
    torch.testing.assert_close(schedule.sigma_prime(t), process.mixing_rate(t).mask, rtol=1e-15, atol=0)
