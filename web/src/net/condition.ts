/** What a network sees of the time: an MLP of sinusoids. */

import { applyLinear, silu, type Linear } from "./linear";
import type { Parameters } from "./parameters";

const TIME_SCALE = 1000;
const SLOWEST = 10_000;

/**
 * Returns the sinusoidal features of a time: cosines, then sines, of 1000 t 10000^(-i/half).
 *
 * Each operation is rounded to float32 as in the library. An angle is up to 1000, so that its rounding is not small.
 */
export function sinusoids(t: number, width: number): Float64Array {
  const round = Math.fround;
  const half = width / 2;
  const value = round(round(t) * TIME_SCALE);
  const exponent = round(-Math.log(SLOWEST) / half);
  const features = new Float64Array(width);
  for (let i = 0; i < half; i++) {
    const angle = round(value * round(Math.exp(round(i * exponent))));
    features[i] = round(Math.cos(angle));
    features[half + i] = round(Math.sin(angle));
  }
  return features;
}

/** The conditioning vector of a network with time and without classes. */
export class Condition {
  private readonly first: Linear;
  private readonly last: Linear;

  constructor(parameters: Parameters) {
    this.first = parameters.linear("time.0");
    this.last = parameters.linear("time.2");
  }

  /** Returns the conditioning vector of a time. */
  at(t: number): Float64Array {
    return applyLinear(this.last, silu(applyLinear(this.first, sinusoids(t, this.first.inputs))));
  }
}
