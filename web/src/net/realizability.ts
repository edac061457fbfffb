/**
 * Scores and posteriors of one position under uniform noise: the bridge, its inverse, the projection and the classes.
 *
 * With alpha = alpha_t, m = (1 - alpha_t) / K and the current token k, a site has three numbers (`Site`). All formulas are
 * those of `m2s.conversions` and `m2s.realizability`, in float64.
 */

/** The numbers that describe a position at time t under uniform noise with the schedule alpha_t = 1 - t. */
export interface Site {
  /** alpha_t, the probability that the token is untouched. */
  alpha: number;
  /** m_t = (1 - alpha_t) / K, the probability of one replacement. */
  mixing: number;
  /** alpha_t + m_t, the probability that the token is the same. */
  stay: number;
}

/** Classes of a score, by the number that `classify` returns. */
export const SCORE_CLASSES = ["outside", "material", "boundary", "realizable"] as const;

const BOX_TOLERANCE = 1e-6; // relative
const POSTERIOR_TOLERANCE = 1e-6;
const PASSES = 100; // an iteration limit, because rounding can make the support alternate; 3 or 4 passes occur

/** Returns the numbers of a position at time t for K tokens. */
export function siteAt(t: number, states: number): Site {
  const [alpha, mixing] = [1 - t, t / states];
  return { alpha, mixing, stay: alpha + mixing };
}

/**
 * Returns the score of a posterior, by the bridge (Eq. 7).
 *
 *     s_y = m [off / m + mu_k / (alpha + m)] + alpha mu_y / m,    off = sum_{z != k} mu_z
 */
export function scoreFromPosterior(mu: Float64Array, k: number, { alpha, mixing, stay }: Site): Float64Array {
  let off = 0;
  for (let z = 0; z < mu.length; z++) if (z !== k) off += mu[z];
  const common = mixing * (off / mixing + mu[k] / stay);
  const score = mu.map((value) => common + (alpha / mixing) * value);
  score[k] = 1;
  return score;
}

/**
 * Returns the signed posterior of a score: the vector with sum one whose bridge is the score (appendix D.1).
 *
 * With w = (s - delta) m / alpha, delta = m / (alpha + m) and W = sum_{y != k} w_y, it solves
 * (I + curvature 1 1^T) u = w + delta W off k, curvature = 2 delta + (K - 1) delta^2. Its entry at k is 1 - sum(u).
 */
export function affineInverse(score: Float64Array, k: number, { alpha, mixing, stay }: Site): Float64Array {
  const others = score.length - 1;
  const delta = mixing / stay;
  const mu = score.map((value) => (value - delta) * (mixing / alpha));
  mu[k] = 0;
  const total = sum(mu);
  const shift = delta * total;
  const curvature = 2 * delta + others * delta ** 2;
  const onto = shift - (curvature * (total + others * shift)) / (1 + others * curvature);
  for (let y = 0; y < mu.length; y++) mu[y] += onto;
  mu[k] = 0;
  mu[k] = 1 - sum(mu);
  return mu;
}

/**
 * Returns the posterior whose score is nearest to a given score (Eq. 11, appendix D.4).
 *
 * It is mu_y = [s_y - sigma]_+ m / alpha at y != k, where sigma is the root of
 *
 *     sum_{y != k} [s_y - sigma]_+ = min(alpha / m, (sigma - origin) / curvature),
 *
 *     origin = delta - delta sum_{y != k} (s_y - delta),    curvature = 2 delta + (K - 1) delta^2.
 *
 * Left minus right is convex, decreasing and piecewise linear. Newton's method climbs from a lower bound of the root and
 * stops, exactly, when the support stops changing.
 */
export function project(score: Float64Array, k: number, { alpha, mixing, stay }: Site): Float64Array {
  const count = score.length - 1;
  const slope = alpha / mixing;
  const delta = mixing / stay;
  const gain = 1 / (2 * delta + count * delta ** 2);
  let [total, top] = [0, -Infinity];
  for (let y = 0; y < score.length; y++) {
    if (y === k) continue;
    total += score[y];
    top = Math.max(top, score[y]);
  }
  const origin = delta - delta * (total - count * delta);
  const bound = (mass: number, size: number): number =>
    Math.max((mass - slope) / size, (mass + origin * gain) / (size + gain));
  // sigma is near + beyond, so that (s - near) - beyond keeps its digits where the score is large.
  let near = Math.max(bound(total, count), bound(top, 1));
  let [beyond, size, before] = [0, -1, -1];
  for (let pass = 0; pass < PASSES; pass++) {
    near += beyond;
    let [mass, support] = [0, 0];
    for (let y = 0; y < score.length; y++) {
      if (y === k || score[y] < near) continue;
      mass += score[y] - near;
      support++;
    }
    beyond = Math.max((mass - slope) / support, (mass - (near - origin) * gain) / (support + gain));
    const seen = support === size || support === before;
    [size, before] = [support, size];
    if (seen) break;
  }
  const mu = score.map((value) => Math.max(0, value - near - beyond) / slope);
  mu[k] = 0;
  const active = (near + beyond - origin) * gain > slope;
  mu[k] = active ? 0 : Math.max(0, 1 - sum(mu));
  return mu;
}

/** Returns the class of a score (Eqs. 12, 13): 0 outside the box, 1 material, 2 boundary, 3 realizable. */
export function classify(score: Float64Array, k: number, site: Site): number {
  const [low, high] = [site.mixing / site.stay, site.stay / site.mixing];
  // Negated inequalities, so that NaN counts as outside.
  const outside = score.some(
    (value, y) => y !== k && !(value >= low * (1 - BOX_TOLERANCE) && value <= high * (1 + BOX_TOLERANCE)),
  );
  if (outside) return 0;
  let lowest = Infinity;
  for (const value of affineInverse(score, k, site)) lowest = Math.min(lowest, value);
  if (lowest < -POSTERIOR_TOLERANCE) return 1;
  return lowest < 0 ? 2 : 3;
}

/**
 * Returns the weights of the analytic step of SEDD from time t to s, before the positive part is taken.
 *
 *     w_y = (s_y - q sum(s)) / A  P_{t|s}(k|y),    A = alpha_t / alpha_s,    q = (1 - A) / K
 *
 * At s = 0 they are those of SEDD's denoiser. They sum to one. On a realizable score they are the Bayes step.
 */
export function analyticWeights(score: Float64Array, k: number, s: number, t: number): Float64Array {
  const survival = s <= 0 ? 1 - t : (1 - t) / (1 - s);
  const mixing = (s <= 0 ? t : (t - s) / (1 - s)) / score.length;
  const total = sum(score) - score[k] + 1;
  return score.map((value, y) => {
    const staggered = ((y === k ? 1 : value) - mixing * total) / survival;
    return staggered * (y === k ? survival + mixing : mixing);
  });
}

/** Returns the sum of the entries. */
export function sum(values: Float64Array): number {
  let total = 0;
  for (const value of values) total += value;
  return total;
}
