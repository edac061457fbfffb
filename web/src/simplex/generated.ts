// The distribution that the reverse process of one site generates with a score that is wrong in a known way.
//
// The exact score of a data distribution p is multiplied by factors: in every state x != y, the score of the jump to y is
// multiplied by factors[y], at all times. This extends Figure 1 of the paper, where one factor differs from 1.

import type { Vector } from "./uniform";
import { analyticWeights, positivePart, project, scoreFromLeaveOneOut, scoreFromPosterior } from "./uniform";

/** The time at which a sampler with finitely many steps starts. Its first step would be infinite from t = 1. */
export const FIRST_TIME = 0.999;

/** Returns the exact score of the jump from k, multiplied by the factors. */
export function scaledScore(p: Vector, factors: Vector, k: number, t: number): number[] {
  return scoreFromLeaveOneOut(p, k, t).map((value, y) => (y === k ? 1 : value * factors[y]));
}

/** What is drawn from: the score as it is, or the score of the nearest posterior. */
function usedScore(p: Vector, factors: Vector, k: number, t: number, projected: boolean): number[] {
  const score = scaledScore(p, factors, k, t);
  return projected ? scoreFromPosterior(project(score, k, t), k, t) : score;
}

/**
 * Returns the distribution after `steps` analytic steps of equal length from FIRST_TIME to 0, by summing over all paths of the
 * Markov chain. It starts from the uniform distribution. Where weights are negative, the sampler draws from the positive part.
 */
export function chainDistribution(p: Vector, factors: Vector, steps: number, projected: boolean): number[] {
  let q = p.map(() => 1 / p.length);
  for (let step = 0; step < steps; step++) {
    const t = FIRST_TIME * (1 - step / steps);
    const s = FIRST_TIME * (1 - (step + 1) / steps);
    const next = p.map(() => 0);
    q.forEach((mass, k) => {
      const row = positivePart(analyticWeights(usedScore(p, factors, k, t, projected), k, s, t));
      row.forEach((probability, y) => (next[y] += mass * probability));
    });
    q = next;
  }
  return q;
}

const START = 1e-10; // the reverse equation is integrated from t = 1 - START to t = END
const END = 1e-9;

/**
 * Returns the distribution in the limit of infinitely many steps: the solution of the reverse equation dq/d(-sigma) = q R_sigma
 * by the classical Runge-Kutta method with equal steps in sigma = -log alpha_t, as m2s.report.toy.terminal_distribution. `step`
 * is the largest step.
 */
export function limitDistribution(p: Vector, factors: Vector, projected: boolean, step: number): number[] {
  const last = -Math.log(START);
  const first = -Math.log1p(-END);
  const steps = Math.ceil((last - first) / step);
  const h = (last - first) / steps;
  const states = p.length;

  /** The generator per unit of sigma, R(x -> y) = s_y(x) / K, row by row. */
  const generator = (node: number): number[][] => {
    const t = -Math.expm1(-(last - (node * h) / 2));
    return p.map((_, x) => {
      const jumps = usedScore(p, factors, x, t, projected).map((value, y) => (y === x ? 0 : value / states));
      jumps[x] = -jumps.reduce((sum, value) => sum + value, 0);
      return jumps;
    });
  };
  const flow = (q: Vector, rates: number[][]): number[] =>
    p.map((_, y) => q.reduce((sum, mass, x) => sum + mass * rates[x][y], 0));
  const moved = (q: Vector, by: number, slope: Vector): number[] => q.map((mass, y) => mass + by * slope[y]);

  let q = p.map(() => 1 / states);
  let left = generator(0);
  for (let i = 0; i < steps; i++) {
    const middle = generator(2 * i + 1);
    const right = generator(2 * i + 2);
    const k1 = flow(q, left);
    const k2 = flow(moved(q, h / 2, k1), middle);
    const k3 = flow(moved(q, h / 2, k2), middle);
    const k4 = flow(moved(q, h, k3), right);
    q = q.map((mass, y) => mass + (h / 6) * (k1[y] + 2 * k2[y] + 2 * k3[y] + k4[y]));
    left = right;
  }
  return q;
}
