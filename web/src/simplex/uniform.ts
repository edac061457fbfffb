// One site under uniform noise with alpha_t = 1 - t, in float64: the same conversions as m2s.conversions and m2s.realizability.
//
//   posterior       mu_z = Pr(X_0 = z | X_t)
//   leave-one-out   nu_z = Pr(X_0 = z | the other sites)
//   score           s_y  = p_t(x with y at this site) / p_t(x), and s_k = 1 at the current token k
//
// tests/golden/simplex.json holds the results of the Python library, and tests/simplex.test.ts compares with it.

export type Vector = readonly number[];

export const BOX_TOLERANCE = 1e-6;
export const POSTERIOR_TOLERANCE = 1e-6;

/** Names of the classes of a score vector, by number, as in m2s.realizability.SCORE_CLASSES. */
export const CLASS_NAMES = ["outside", "material", "boundary", "realizable"] as const;

/** Returns m_t(y) = t / K, the probability that noise puts token y. */
function mixing(states: number, t: number): number {
  return t / states;
}

/** Returns rho_t = P_t(y|x) / P_t(x|x) for y != x. The box of scores is [rho, 1 / rho] (Eq. 12). */
export function rho(states: number, t: number): number {
  const m = mixing(states, t);
  return m / (1 - t + m);
}

/** Returns the sum of the entries other than k. */
function sumWithout(values: Vector, k: number): number {
  let sum = 0;
  for (let y = 0; y < values.length; y++) if (y !== k) sum += values[y];
  return sum;
}

/** Returns s_y = (alpha nu_y + m) / (alpha nu_k + m). */
export function scoreFromLeaveOneOut(nu: Vector, k: number, t: number): number[] {
  const m = mixing(nu.length, t);
  const at = (1 - t) * nu[k] + m;
  return nu.map((value, y) => (y === k ? 1 : ((1 - t) * value + m) / at));
}

/** Returns mu_z, proportional to nu_z P_t(k|z). */
export function posteriorFromLeaveOneOut(nu: Vector, k: number, t: number): number[] {
  const m = mixing(nu.length, t);
  const joint = nu.map((value, z) => value * (z === k ? 1 - t + m : m));
  const total = joint.reduce((sum, value) => sum + value, 0);
  return joint.map((value) => value / total);
}

/** Returns the bridge (Eq. 7): s_y = off + rho mu_k + (1/rho - 1) mu_y, where off sums mu over y != k. Linear in mu. */
export function scoreFromPosterior(mu: Vector, k: number, t: number): number[] {
  const r = rho(mu.length, t);
  const common = sumWithout(mu, k) + r * mu[k];
  return mu.map((value, y) => (y === k ? 1 : common + (1 / r - 1) * value));
}

/**
 * Returns the signed posterior of a score (appendix D.1): the vector with sum one whose bridge is the score.
 * m = sum_{y != k} (s_y - rho) / ((1-rho) (K-1 + 1/rho)), mu_k = 1 - m, mu_y = (s_y - rho - (1-rho) m) / (1/rho - 1).
 */
export function affineInverse(score: Vector, k: number, t: number): number[] {
  const states = score.length;
  const r = rho(states, t);
  const m = (sumWithout(score, k) - (states - 1) * r) / ((1 - r) * (states - 1 + 1 / r));
  return score.map((value, y) => (y === k ? 1 - m : (value - r - (1 - r) * m) / (1 / r - 1)));
}

/** What is measured of a score vector, as in m2s.diagnose. */
export interface Diagnosis {
  /** 0 outside the box, 1 material, 2 boundary, 3 realizable. */
  class: number;
  /** The number of coordinates outside the box. */
  outside: number;
  /** The signed posterior. */
  signed: number[];
  /** The least entry of the signed posterior. */
  lowest: number;
}

/** Classifies a score vector (Eqs. 12, 13). */
export function diagnose(score: Vector, k: number, t: number): Diagnosis {
  const r = rho(score.length, t);
  let outside = 0;
  let beyond = 0;
  for (let y = 0; y < score.length; y++) {
    if (y === k) continue;
    if (!(score[y] >= r && score[y] <= 1 / r)) outside++;
    if (!(score[y] >= r * (1 - BOX_TOLERANCE) && score[y] <= (1 / r) * (1 + BOX_TOLERANCE))) beyond++;
  }
  const signed = affineInverse(score, k, t);
  const lowest = Math.min(...signed);
  const inside = lowest < -POSTERIOR_TOLERANCE ? 1 : lowest < 0 ? 2 : 3;
  return { class: beyond > 0 ? 0 : inside, outside, signed, lowest };
}

/**
 * Returns the posterior whose bridge is nearest to a score (Eq. 11, appendix D.4): mu_y = [s_y - sigma]_+ / b at y != k.
 * The threshold sigma is the greatest root over the j largest scores, j = 0, 1, 2, ...
 */
export function project(score: Vector, k: number, t: number): number[] {
  const states = score.length;
  const m = mixing(states, t);
  const b = (1 - t) / m;
  const r = rho(states, t);
  const others = score.filter((_, y) => y !== k).sort((a, c) => c - a);
  const total = others.reduce((sum, value) => sum + value, 0);
  const origin = r - r * (total - (states - 1) * r);
  const gain = 1 / (2 * r + (states - 1) * r * r);
  let sigma = origin;
  let mass = 0;
  others.forEach((value, index) => {
    mass += value;
    sigma = Math.max(sigma, (mass - b) / (index + 1), (mass + origin * gain) / (index + 1 + gain));
  });
  const mu = score.map((value, y) => (y === k ? 0 : Math.max(0, value - sigma) / b));
  mu[k] = Math.max(0, 1 - sumWithout(mu, k));
  return mu;
}

/**
 * Returns the weights of SEDD's analytic step from t to s, with negative entries where there are some:
 * w_y = (score - q sum(score))_y / A * P_{t|s}(k|y), where A = alpha_t / alpha_s and q = (1 - A) / K. They sum to one.
 */
export function analyticWeights(score: Vector, k: number, s: number, t: number): number[] {
  const survival = (1 - t) / (1 - s);
  const q = (t - s) / (1 - s) / score.length;
  const total = sumWithout(score, k) + 1;
  return score.map((value, y) => {
    const staggered = ((y === k ? 1 : value) - q * total) / survival;
    return staggered * (y === k ? survival + q : q);
  });
}

/** Returns the distribution that the analytic sampler draws from: the positive part of the weights, normalized. */
export function positivePart(weights: Vector): number[] {
  const total = weights.reduce((sum, value) => sum + Math.max(0, value), 0);
  return weights.map((value) => Math.max(0, value) / total);
}

/** Returns the total variation distance of two distributions. */
export function totalVariation(a: Vector, b: Vector): number {
  return a.reduce((sum, value, i) => sum + Math.abs(value - b[i]), 0) / 2;
}

/** Returns the excess of score entropy over its least value: sum over y != k of s_y - e_y + e_y log(e_y / s_y) (Prop. 4.3). */
export function excess(score: Vector, exact: Vector, k: number): number {
  return score.reduce((sum, s, y) => (y === k ? sum : sum + s - exact[y] + exact[y] * Math.log(exact[y] / s)), 0);
}
