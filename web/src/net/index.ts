/**
 * The networks and samplers of the library, for the lab.
 *
 *     const model = makeModel(decodeWeights(globalThis.m2sWeights["digits-sedd"]));
 *     let tokens = startTokens(model, { seed, sample });
 *     makePlan(model, 16).forEach(({ t, s }, step) => {
 *       const result = reverseStep(model, tokens, t, s, { seed, sample, step, repair, temperature });
 *       tokens = result.tokens;
 *     });
 *
 * These are the tokens of m2s.sample(model, head, (1, length), steps=16, seed=seed, start=sample), where the head is
 * m2s.Projected(head) and the sampler "analytic" with `repair`.
 */

export { makeModel, T_MIN, type Model } from "./model";
export { makePlan, reverseStep, startTokens, type Move, type StepOptions, type StepResult } from "./sampling";
export { decodeWeights, type Weights } from "./weights";
