"""Mutation tests: each of these single changes to a formula makes the named test fail.

A mutant is a copy of the package with one piece of text replaced. The named test runs against the copy. It must fail by an
assertion or an error inside the test, not because the copy cannot be imported. All mutants of a process change the same copy,
one after the other, so that unchanged modules are compiled once.
"""

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis
import jaxtyping
import pytest
from fork_server import SERVER

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "m2s"


class Mutant(NamedTuple):
    """A change of one file, and the test that must fail."""

    file: str
    old: str
    new: str
    caught_by: str  # file::test


MUTANTS = {
    "bridge: term of the current token divided by m(k)": Mutant(
        "conversions/bridge.py",
        "gather_at(posterior, x_t).squeeze(-1) / site.stay",
        "gather_at(posterior, x_t).squeeze(-1) / divisor",
        "test_theorems.py::test_bridge_theorem",
    ),
    "bridge: off counts the current token too": Mutant(
        "conversions/bridge.py",
        "scatter_at(posterior, x_t, 0.0).sum(-1) / divisor",
        "posterior.sum(-1) / divisor",
        "test_theorems.py::test_bridge_theorem",
    ),
    "bridge in logarithms: slope inverted": Mutant(
        "heads/posterior.py",
        "torch.log(site.alpha / divisor)",
        "torch.log(divisor / site.alpha)",
        "test_theorems.py::test_bridge_theorem",
    ),
    "transition matrix: uniform noise excludes the current token": Mutant(
        "process/uniform.py",
        "Mixing(mass / self.vocab, torch.zeros_like(mass))",
        "Mixing(mass / (self.vocab - 1), torch.zeros_like(mass))",
        "test_theorems.py::test_bridge_theorem",
    ),
    "rates: hybrid loses its factor 2": Mutant(
        "process/hybrid.py",
        "self._b / (2 * torch.sqrt(t * (1 - t)) * (1 + c))",
        "self._b / (torch.sqrt(t * (1 - t)) * (1 + c))",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "step: hybrid loses a root": Mutant(
        "process/hybrid.py",
        "torch.sqrt(1 - t) * removed / torch.where",
        "(1 - t) * removed / torch.where",
        "process/test_transition_matrices.py::test_chapman_kolmogorov",
    ),
    "expm: a short step doubled with the wrong sign": Mutant(
        "process/expm.py",
        "(2 - leave.unsqueeze(-1) - leave.unsqueeze(-2))",
        "(2 - leave.unsqueeze(-1) + leave.unsqueeze(-2))",
        "test_theorems.py::test_bridge_theorem",
    ),
    "offset: log instead of log1p": Mutant(
        "heads/posterior.py",
        "torch.log1p(site.alpha / site.m_k.where(reached, 1))",
        "torch.log(site.alpha / site.m_k.where(reached, 1))",
        "conversions/test_identities.py::test_exact_leave_one_out_gives_the_exact_posterior_and_score",
    ),
    "leave-one-out: divides where it should multiply": Mutant(
        "conversions/bridge.py",
        "joint = leave_one_out * process.columns(x_t, to_float64(t))",
        "joint = leave_one_out / process.columns(x_t, to_float64(t))",
        "conversions/test_identities.py::test_exact_leave_one_out_gives_the_exact_posterior_and_score",
    ),
    "masked loss: 1 - alpha becomes alpha": Mutant(
        "losses/masked_cross_entropy.py",
        "schedule.beta(to_float64(t))",
        "schedule.alpha(to_float64(t))",
        "test_theorems.py::test_md4_reduction",
    ),
    "affine inverse: curvature of one candidate only": Mutant(
        "conversions/inverse.py",
        "2 * delta + n * delta**2",
        "2 * delta + delta**2",
        "realizability/test_polytope.py::test_affine_inverse_is_the_closed_form",
    ),
    "projection: half the cross term": Mutant(
        "ops/project/cpu.py",
        "2 * delta + (vocab - 1) * delta**2",
        "delta + (vocab - 1) * delta**2",
        "realizability/test_polytope.py::test_projection_is_the_nearest",
    ),
    "loss: e of the bulk with the wrong sign": Mutant(
        "ops/posterior_entropy/cpu.py",
        "-mu.mu_k * alpha / p_kk)\n    flow",
        "mu.mu_k * alpha / p_kk)\n    flow",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "loss: a factor 1/rho left out where k = x_0": Mutant(
        "ops/posterior_entropy/cpu.py",
        "torch.where(case.same, p_kk / m_k, 1) * alpha",
        "alpha",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "loss: a term of e at x_0 dropped": Mutant(
        "ops/posterior_entropy/cpu.py",
        "(mu.rest + mu.mu_k + m_clean * mu.mu_k / p_kk)",
        "(mu.rest + mu.mu_k)",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "loss: the mask is not a candidate": Mutant(
        "ops/posterior_entropy/cpu.py",
        "k_clean & (site.mask > 0)",
        "k_clean & (site.mask > 2)",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "loss in float32: a factor of the product on the wrong side": Mutant(
        "ops/posterior_entropy/cpu_passes.py",
        "sum_g -= torch.log(v[:, -1:])",
        "sum_g += torch.log(v[:, -1:])",
        "losses/test_precision.py::test_posterior_loss_on_random_examples",
    ),
    "gradient: the term of the current token dropped": Mutant(
        "ops/posterior_entropy/cpu.py",
        "-scale * mu.mu_k * (g_bar + mu.off * big_c / p_kk)",
        "-scale * mu.mu_k * g_bar",
        "conversions/test_identities.py::test_score_entropy_gradient",
    ),
    "gradient: the diagonal term of the mean counted twice": Mutant(
        "ops/posterior_entropy/cpu.py",
        "shift = mu.mu_k * big_c / p_kk - g_bar",
        "shift = mu.mu_k * big_c / p_kk - g_bar - at_x.mu_g",
        "conversions/test_identities.py::test_score_entropy_gradient",
    ),
    "unconstrained loss: the constant dropped": Mutant(
        "ops/score_entropy/cpu.py",
        "torch.expm1(d) - d",
        "torch.exp(d) - d",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "unconstrained loss: ratios indexed by the noisy token": Mutant(
        "ops/score_entropy/cpu.py",
        "columns = [(x, log_r_x)]",
        "columns = [(k, log_r_x)]",
        "test_theorems.py::test_score_entropy_is_its_definition",
    ),
    "factorized loss: the mask counts as no clean candidate": Mutant(
        "ops/factorized_entropy/cpu.py",
        "torch.where(same | masked, 1, 2)",
        "torch.where(same, 1, 2)",
        "ops/test_naive.py::test_factorized_score_entropy",
    ),
    "factorized loss: the current token is a jump destination": Mutant(
        "ops/factorized_entropy/cpu.py",
        "value.scatter(-1, k[at], -torch.inf)",
        "value",
        "ops/test_naive.py::test_factorized_score_entropy",
    ),
    "fused GIDD: the weight clipped without P_t(k|x_0)": Mutant(
        "losses/gidd.py",
        "max_weight * at_k.where(at_k > 0, 1)",
        "max_weight * torch.ones_like(at_k)",
        "losses/test_fused_forms.py::test_values_and_gradients_in_float64",
    ),
    "fused path KL, GIDD: rates of another time": Mutant(
        "losses/score_entropy.py",
        "row_loss_at(head, process, x_0, x_t, t, process.at(x_t, to_float64(t)))",
        "row_loss_at(head, process, x_0, x_t, t, process.at(x_t, to_float64(t) / 2))",
        "losses/test_fused_forms.py::test_values_and_gradients_in_float64",
    ),
    "box: upper end without m(y)": Mutant(
        "conversions/inverse.py",
        "(site.alpha + site.clean) / divisor",
        "site.alpha / divisor",
        "realizability/test_polytope.py::test_box_is_the_range_of_the_bridge",
    ),
    "classes: material and boundary exchanged": Mutant(
        "realizability/classes.py",
        "torch.where(material, 1, torch.where(lowest < 0, 2, 3))",
        "torch.where(material, 2, torch.where(lowest < 0, 1, 3))",
        "realizability/test_polytope.py::test_box_and_polytope_classes",
    ),
    "Bayes: the arriving token may not have stayed": Mutant(
        "process/rank_one.py",
        "self._column(x_t, into, survival + into)",
        "self._column(x_t, into, survival)",
        "conversions/test_identities.py::test_bayes_probabilities",
    ),
    "analytic step: mean over the candidates only": Mutant(
        "conversions/reverse_step.py",
        "total = score.sum(-1, keepdim=True)",
        "total = score.sum(-1, keepdim=True) - 1",
        "conversions/test_identities.py::test_analytic_weights_are_the_released_ones",
    ),
    "NELBO: the length of the interval dropped": Mutant(
        "losses/elbo.py",
        "(end - low) * terms.integrand(",
        "terms.integrand(",
        "losses/test_elbo.py::test_elbo_terms",
    ),
    "NELBO: reconstruction dropped": Mutant(
        "losses/elbo.py",
        "torch.stack(integral) + torch.stack(reconstruction) + prior",
        "torch.stack(integral) + prior",
        "losses/test_elbo.py::test_elbo_is_above_the_exact_nll",
    ),
    "reconstruction: the likelihood of the current token dropped": Mutant(
        "heads/unconstrained.py",
        "joint = log_score + safe_log(self.process.columns(x_t, to_float64(t))).to(log_score.dtype)",
        "joint = log_score",
        "test_elbo_theorem.py::test_elbo_theorem_with_its_ends_cut",
    ),
    "bayes: the jump keeps no token": Mutant(
        "samplers/bayes.py",
        "total = process.vocab * mixing_s.clean + mixing_s.mask",
        "total = (process.vocab - 1) * mixing_s.clean + mixing_s.mask",
        "samplers/test_step_distributions.py::test_bayes_step",
    ),
    "bayes: alpha at the wrong end": Mutant(
        "samplers/bayes.py",
        "alpha_s, mixing_s = process.alpha(s), process.mixing(s)",
        "alpha_s, mixing_s = process.alpha(t), process.mixing(s)",
        "samplers/test_step_distributions.py::test_bayes_step",
    ),
    "euler: a jump may lead back to the current token": Mutant(
        "ops/reverse_step/routes.py",
        "target + (target >= k)",
        "target",
        "samplers/test_step_distributions.py::test_euler_step",
    ),
    "analytic: the last step leads to the mask": Mutant(
        "samplers/prediction.py",
        "return weights if self.process.mask is None else torch.nn.functional.pad(weights[..., : self.process.vocab], (0, 1))",
        "return weights",
        "samplers/test_step_distributions.py::test_analytic_step",
    ),
    "gibbs: the current token dropped": Mutant(
        "samplers/predictor_corrector.py",
        "new = draw_categorical(score, noise",
        "new = draw_categorical(score * (score != 1), noise",
        "samplers/test_step_distributions.py::test_gibbs_corrector_preserves_the_distribution",
    ),
    "psi: the uniform number of the corrector is not rescaled": Mutant(
        "samplers/psi.py",
        "u = (choice - kappa) / (1 - kappa).where(kappa < 1, 1)",
        "u = choice - kappa",
        "samplers/test_uniform_samplers.py::test_psi_step[uniform-linear-0.6]",
    ),
    "psi: fresh noise at time t in place of s": Mutant(
        "samplers/psi.py",
        "at_s = rank_one.at(part.x_t, to_float64(s))",
        "at_s = rank_one.at(part.x_t, part.t)",
        "samplers/test_uniform_samplers.py::test_guided_steps_combine_the_distributions_of_both_predictions[psi]",
    ),
    "absorbing_uniform: replaces as often as with fresh noise": Mutant(
        "samplers/absorbing_uniform.py",
        "return process.alpha(s) - stay * process.alpha(t), stay",
        "return process.alpha(s) * (1 - stay), stay",
        "samplers/test_marginals.py::test_one_site[absorbing_uniform]",
    ),
    "entropy bound: the sum includes the greatest entropy": Mutant(
        "samplers/entropy_bound.py",
        "torch.nn.functional.pad(ranked.cumsum(-1)[:, :-1], (1, 0))",
        "ranked.cumsum(-1)",
        "samplers/test_uniform_samplers.py::test_entropy_bound_step[uniform-linear-0.0]",
    ),
    "informed corrector: chooses the most confident sites": Mutant(
        "samplers/informed.py",
        "return confidence / self.selection_temperature +",
        "return -confidence / self.selection_temperature +",
        "samplers/test_uniform_samplers.py::test_informed_choice_has_the_stated_probabilities",
    ),
    "remasking: does not unmask more to compensate for remasking": Mutant(
        "samplers/remasking.py",
        "(alpha_s - (1 - again) * alpha_t)",
        "(alpha_s - alpha_t)",
        "samplers/test_masked_steps.py::test_remasking_step",
    ),
    "first hitting: the time of one mask instead of the first of n": Mutant(
        "samplers/first_hitting.py",
        "/ left.clamp(min=1)",
        "/ 1",
        "samplers/test_masked_steps.py::test_first_hitting_times",
    ),
    "guidance: the weights swapped": Mutant(
        "samplers/logits_processor.py",
        "guidance * conditional + (1 - guidance) * unconditional",
        "(1 - guidance) * conditional + guidance * unconditional",
        "samplers/test_guidance_and_sharpening.py::test_guidance",
    ),
    "draw: sums in the precision of the weights": Mutant(
        "ops/categorical.py",
        "sums = blocks.sum(-1, dtype=float64_dtype(weights))",
        "sums = blocks.sum(-1)",
        "samplers/test_draws.py::test_a_long_tail_is_drawn_uniformly_at_its_rate",
    ),
    "noise: does not depend on the step": Mutant(
        "ops/philox/naive.py",
        "philox((samples & LOW, step, sites, extra), key)",
        "philox((samples & LOW, 0 * step, sites, extra), key)",
        "samplers/test_counter_noise.py::test_uniforms_are_a_function_of_the_counter",
    ),
    "micro-batch: size depends on the number of samples": Mutant(
        "samplers/loop.py",
        "micro_batches(window, options.call_rows, run.device)",
        "micro_batches(window, len(samples), run.device)",
        "samplers/test_reproducibility.py::test_samples_do_not_depend_on_how_a_run_is_divided",
    ),
    "projection: one branch only": Mutant(
        "ops/project/cpu.py",
        "return torch.maximum((mass - slope) / size, (mass - (near - origin) * gain) / (size + gain)), size",
        "return (mass - (near - origin) * gain) / (size + gain), size",
        "realizability/test_projection.py",
    ),
    "start: unmasked tokens at t = 1 of a log-linear schedule ignored": Mutant(
        "process/rank_one.py",
        "        if self.is_pure_mask:\n            return mixing_vector(self, Mixing(torch.zeros_like(end), end))\n",
        "",
        "samplers/test_perfect_networks.py::test_samples_start_from_masks[ancestral-absorbing-log-linear]",
    ),
    "start: unmasked tokens at t = 1 of a chain ignored": Mutant(
        "process/base.py",
        "if self.mask is not None and bool(end[self.mask, self.mask] == 1):",
        "if False:",
        "samplers/test_perfect_networks.py::test_samples_are_the_data[bayes-chain-absorbing-not-to-the-end]",
    ),
    "prior: of masks in place of the tokens left at t = 1": Mutant(
        "losses/elbo.py",
        'survival = validation.align("t", rank_one.alpha(t), x_0)',
        'survival = validation.align("t", rank_one.mixing(t).mask, x_0)',
        "losses/test_elbo.py::test_elbo_terms[exact-absorbing-loglinear]",
    ),
    "end: a tau-leaping step in place of the last denoising step": Mutant(
        "samplers/reverse_process.py",
        "x_s = last = sampler.last_step(prediction, noise) if some",
        "x_s = last = sampler.step(prediction, move, noise) if some",
        "samplers/test_perfect_networks.py::test_samples_are_the_data[ordinal_tau_leaping-gaussian-geometric]",
    ),
    "end: denoising by a score leaves the noise of t = 0": Mutant(
        "process/rank_one.py",
        "clean, total = s <= 0, self.mixing(t)",
        "clean, total = s < 0, self.mixing(t)",
        "samplers/test_perfect_networks.py::test_samples_are_the_data[analytic-uniform-geometric]",
    ),
    "end: score and inverse at different times": Mutant(
        "samplers/reverse_process.py",
        "plan = plan._replace(t=torch.where(plan.s <= 0, plan.t.clamp(min=t_min), plan.t))",
        "pass",
        "samplers/test_perfect_networks.py::test_samples_are_the_data_of_a_network_that_sees_no_small_times[analytic-uniform-geometric]",
    ),
    "ranking: confidence after temperature and top-k": Mutant(
        "samplers/confidence.py",
        "prediction.without_sharpening().probability(drawn.token) if sharpens else drawn.probability",
        "drawn.probability",
        "samplers/test_perfect_networks.py::test_sites_are_ranked_by_the_unsharpened_prediction[confidence-greedy]",
    ),
    "ranking: adaptive after temperature and top-k": Mutant(
        "samplers/adaptive.py",
        "part.without_sharpening().leave_one_out() if part.logits_processor.sharpens else sharpened",
        "sharpened",
        "samplers/test_perfect_networks.py::test_sites_are_ranked_by_the_unsharpened_prediction[adaptive-greedy]",
    ),
    "ranking: ties from left to right": Mutant(
        "samplers/first_hitting.py",
        "    if ties is None:",
        "    if True:",
        "samplers/test_perfect_networks.py::test_ties_are_broken_by_the_randomness_of_the_sample[confidence]",
    ),
    "modes: all modules into training mode": Mutant(
        "modes.py",
        "                elif training:\n                    module.training = True\n",
        "                else:\n                    module.training = True\n",
        "samplers/test_perfect_networks.py::test_every_module_gets_its_own_mode_back",
    ),
    "guidance of steps: exponents swapped": Mutant(
        "samplers/base.py",
        "return guided_step(conditional, unconditional, part.logits_processor.guidance)",
        "return guided_step(conditional, unconditional, 1 - part.logits_processor.guidance)",
        "samplers/test_guidance_and_sharpening.py::test_guidance_of_steps[uniform-linear-posterior-2.0]",
    ),
    "corrector: an unconstrained score used at a token that is certainly clean": Mutant(
        "samplers/predictor_corrector.py",
        "torch.where(part.is_certainly_clean().unsqueeze(-1),",
        "torch.where(part.is_certainly_clean().unsqueeze(-1) & False,",
        "samplers/test_perfect_networks.py::test_samples_are_the_data[predictor_corrector-absorbing-linear]",
    ),
    "MAUVE: the divergence of the mixture from the samples": Mutant(
        "evaluation/text/mauve.py",
        "[np.exp(-scale * kl(q, r)),",
        "[np.exp(-scale * kl(r, q)),",
        "evaluation/test_mauve.py::test_the_area_is_that_of_the_paper",
    ),
    "k-means: the run with the greatest distances": Mutant(
        "evaluation/text/clusters.py",
        "return min(runs,",
        "return max(runs,",
        "evaluation/test_mauve.py::test_kmeans_returns_the_best_run_and_fills_clusters",
    ),
    "jackknife: groups of neighbors": Mutant(
        "evaluation/text/frechet.py",
        "torch.arange(len(x), device=device) % groups",
        "torch.arange(len(x), device=device) * groups // len(x)",
        "evaluation/test_embedding_distance.py::test_the_jackknife_leaves_out_one_group_at_a_time",
    ),
    "suffix array: a token between the ranks is skipped": Mutant(
        "evaluation/text/suffix_array.py",
        "after = at + width",
        "after = at + width + 1",
        "evaluation/test_suffix_array.py::test_positions_are_sorted_and_matches_are_the_longest",
    ),
    "novelty: an n-gram that occurs counts as novel": Mutant(
        "evaluation/text/novelty.py",
        "width - size + 1] < size)",
        "width - size + 1] <= size)",
        "evaluation/test_text_ngrams.py::test_novelty_is_that_of_sets",
    ),
    "repetition: a sequence shares n-grams with itself": Mutant(
        "evaluation/text/repetition.py",
        "[ids] > 1",
        "[ids] > 0",
        "evaluation/test_text_ngrams.py::test_repetition_is_that_of_sets",
    ),
    "frontier: the entropies that any curve covers": Mutant(
        "evaluation/genppl/frontier.py",
        "float(max(x.min() for x in ranges))",
        "float(min(x.min() for x in ranges))",
        "evaluation/test_frontier.py::test_curves_are_compared_over_the_entropies_that_all_cover",
    ),
    "embedding: the BOS token counts": Mutant(
        "evaluation/judge.py",
        "device=real.device) >= skip)",
        "device=real.device) >= 0)",
        "evaluation/test_judge_states.py::test_states_are_those_of_transformers[llama]",
    ),
    "bigram: the token before an occurrence": Mutant(
        "evaluation/text/adversaries.py",
        "text[at + 1],",
        "text[at - 1],",
        "evaluation/test_adversaries.py::test_bigram_has_the_transitions_of_the_training_text",
    ),
    "any order: n masks weighted by 1/L in place of 1/n": Mutant(
        "evaluation/likelihood/masks.py",
        "(number / size, 1 / number)",
        "(number / size, 1 / size)",
        "evaluation/test_likelihood.py::test_any_order_agrees_with_permutations",
    ),
    "replaced tokens: the case without any is counted twice": Mutant(
        "evaluation/likelihood/touched.py",
        "torch.where(same, nothing, 0)",
        "torch.where(same, 0 * nothing, 0)",
        "evaluation/test_design.py::test_the_split_of_a_time_is_exact",
    ),
    "sweep: every pass starts at the same position": Mutant(
        "evaluation/likelihood/design.py",
        "start = (start + count) % sizes",
        "start = start % sizes",
        "evaluation/test_design.py::test_a_sweep_takes_positions_without_replacement",
    ),
    "reverse process: rates without the score": Mutant(
        "evaluation/likelihood/reverse.py",
        "forward * log_score.exp()",
        "forward * log_score.exp().sqrt()",
        "evaluation/test_likelihood.py::test_reverse_process_agrees_with_the_oracle",
    ),
    "conditional likelihood: the first predicted token is given": Mutant(
        "evaluation/likelihood/conditional.py",
        ">= given.unsqueeze(-1)",
        "> given.unsqueeze(-1)",
        "evaluation/test_conditional.py::test_a_clamped_context_is_a_smaller_problem",
    ),
    "matrix terms: share of the clean token in place of that of the others": Mutant(
        "losses/matrix_terms.py",
        "share, truth = torch.sigmoid(-log_odds)",
        "share, truth = torch.sigmoid(log_odds)",
        "losses/test_matrix_terms.py::test_every_time_of_gaussian_rates",
    ),
    "matrix terms: weights of the clean token kept": Mutant(
        "losses/matrix_terms.py",
        "LARGEST_LOG[log_nu.dtype])), x_0, 0.0)",
        "LARGEST_LOG[log_nu.dtype])), x_0, 1.0)",
        "losses/test_matrix_terms.py::test_every_time_of_gaussian_rates",
    ),
    "group norm: slope of SiLU": Mutant(
        "ops/group_norm/triton.py",
        "dz = upstream * s * (1 + z * (1 - s))",
        "dz = upstream * s * (1 + z * s)",
        "ops/test_group_norm.py::test_values_and_gradients",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, folder / "m2s", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@contextlib.contextmanager
def changed(name: str, folder: Path) -> Iterator[None]:
    """Apply a mutant to the copy. Each mutant has a different modification time, so that no stale bytecode is used."""
    mutant = MUTANTS[name]
    target = folder / "m2s" / mutant.file
    text = target.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}"
    target.write_text(text.replace(mutant.old, mutant.new))
    date = 1 + list(MUTANTS).index(name)
    os.utime(target, (date, date))
    try:
        yield
    finally:
        shutil.copy2(PACKAGE / mutant.file, target)


def judge(folder: str, named: str, here: str) -> None:
    """Run the named tests against the package in `folder`. Exit with pytest's code, or 9 if another package was imported."""
    os.chdir(here)
    with open("log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, folder)
    sys.dont_write_bytecode, sys.pycache_prefix = False, f"{folder}/compiled"
    gc.freeze()
    gc.collect = lambda *_: 0  # pytest collects several times, which takes as long as the test. The process ends soon.
    # Without the checker of shapes the import takes a third of the time, and the named test has to fail by itself.
    jaxtyping.install_import_hook = lambda *_: None
    hypothesis.settings.register_profile("mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
    hypothesis.settings.load_profile("mutants")  # an example that fails is enough: making it small can take minutes
    code = pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"{TESTS}/{named}"])
    seen = sys.modules.get("m2s")
    sys.exit(int(code) if seen is not None and str(seen.__file__).startswith(folder) else 9)


@pytest.mark.parametrize("name", MUTANTS)
def test_single_change_is_caught(name: str, copy: Path, tmp_path: Path) -> None:
    with changed(name, copy):
        child = SERVER.Process(target=judge, args=(str(copy), MUTANTS[name].caught_by, str(tmp_path)))
        child.start()
        child.join()
    output = (tmp_path / "log").read_text()
    assert child.exitcode == 1, f"exit code {child.exitcode}: no test failed\n{output[-4000:]}"
    assert "FAILED" in output and "::test_" in output


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 15
    assert all(mutant.old != mutant.new for mutant in MUTANTS.values())
