/** The frames of a sample: the states from noise to the sample, one for each call of the network and the last one. */

import { makePlan, reverseStep, startTokens, type Model } from "../net/index";
import type { Frame, Settings } from "./protocol";

/** Returns how many frames a sample has. */
export function frameCount(model: Model, steps: number): number {
  return makePlan(model, steps).length + 1;
}

/** Yields the frames of a sample. Each one but the last needs one forward pass. */
export function* frames(model: Model, settings: Settings): Generator<Frame> {
  const { clamp, repair, sample, seed, steps, temperature } = settings;
  const fixed = clamp === null ? {} : { clamp };
  let tokens = startTokens(model, { seed, sample, ...fixed });
  for (const [step, { t, s }] of makePlan(model, steps).entries()) {
    const { tokens: next, ...prediction } = reverseStep(model, tokens, t, s, { seed, sample, step, repair, temperature, ...fixed });
    yield { t, tokens, prediction };
    tokens = next;
  }
  yield { t: 0, tokens, prediction: null };
}
