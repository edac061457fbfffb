// What the simplex shows: the choices of the reader, and everything that follows from them.
import { FIRST_TIME, chainDistribution, limitDistribution, scaledScore } from "./generated";
import type { Diagnosis, Vector } from "./uniform";
import * as uniform from "./uniform";

/** The data distribution of the paper's Figure 1. */
export const DATA: Vector = [0.7, 0.2, 0.1];
export const NAMES = ["A", "B", "C"] as const;
export const STEPS = [1, 2, 4, 8, 16, 32, 64, 128, 256, Infinity] as const;
/** Step of the integrator: its error is below half of the last digit that the page shows, which tests/simplex.test.ts checks. */
export const LIVE_STEP = 0.1;

/** The choices of the reader. The score is the exact one times a factor for each token. */
export interface Choice {
  k: number;
  t: number;
  steps: number;
  factors: number[];
}

/** Everything that follows from a choice. */
export interface Result extends Choice {
  /** The tokens on the horizontal and the vertical axis. */
  axes: [number, number];
  rho: number;
  /** The end of both axes of the plane of scores. */
  end: number;
  exact: number[];
  posterior: number[];
  score: number[];
  diagnosis: Diagnosis;
  nearest: number[];
  nearestScore: number[];
  /** The end of the sampler's step from t, and its weights. */
  s: number;
  weights: number[];
  loss: number;
  generated: number[];
  generatedRepaired: number[];
}

/** Returns the tokens other than k: those on the axes. */
export function axesOf(k: number): [number, number] {
  return k === 0 ? [1, 2] : k === 1 ? [0, 2] : [0, 1];
}

/** Returns the end of both axes. */
export function axisEnd(t: number): number {
  return 1.25 / uniform.rho(3, t);
}

/** Computes everything that the page shows. */
export function compute(choice: Choice): Result {
  const { k, t, steps, factors } = choice;
  const score = scaledScore(DATA, factors, k, t);
  const exact = uniform.scoreFromLeaveOneOut(DATA, k, t);
  const nearest = uniform.project(score, k, t);
  const s = Math.max(0, t - FIRST_TIME / Math.max(steps, 1));
  const generate = (projected: boolean): number[] =>
    steps === Infinity ? limitDistribution(DATA, factors, projected, LIVE_STEP) : chainDistribution(DATA, factors, steps, projected);
  return {
    ...choice,
    axes: axesOf(k),
    rho: uniform.rho(3, t),
    end: axisEnd(t),
    exact,
    posterior: uniform.posteriorFromLeaveOneOut(DATA, k, t),
    score,
    diagnosis: uniform.diagnose(score, k, t),
    nearest,
    nearestScore: uniform.scoreFromPosterior(nearest, k, t),
    s,
    weights: uniform.analyticWeights(score, k, s, t),
    loss: uniform.excess(score, exact, k),
    generated: generate(false),
    generatedRepaired: generate(true),
  };
}

/** Returns the factors with which the score at k is the given one, as far as it is in the picture. */
export function factorsFor(choice: Choice, score: Vector): number[] {
  const exact = uniform.scoreFromLeaveOneOut(DATA, choice.k, choice.t);
  const end = axisEnd(choice.t);
  return choice.factors.map((factor, y) => (y === choice.k ? factor : Math.min(end, Math.max(0.002 * end, score[y])) / exact[y]));
}

/** The places to which the buttons move the score. */
export type Place = "exact" | "wrong" | "material" | "outside";

/** Returns the score of a place. All but the first are on the line through the exact score along the first axis. */
export function scoreAt(place: Place, k: number, t: number): number[] {
  const exact = uniform.scoreFromLeaveOneOut(DATA, k, t);
  if (place === "exact") return exact;
  const y = axesOf(k)[1];
  const r = uniform.rho(3, t);
  const along = (value: number): number[] => exact.map((one, token) => (token === y ? value : one));
  const inside = (value: number): boolean => Math.min(...uniform.affineInverse(along(value), k, t)) >= 0;
  // The signed posterior is affine in the score: the scores with a posterior are an interval. Bisection finds its ends.
  const edge = (limit: number): number => {
    let [good, bad] = [exact[y], limit];
    for (let i = 0; i < 60; i++) {
      const middle = (good + bad) / 2;
      if (inside(middle)) good = middle;
      else bad = middle;
    }
    return good;
  };
  const ends = [
    { edge: edge(r), box: r },
    { edge: edge(1 / r), box: 1 / r },
  ];
  const wide = Math.abs(ends[0].edge - r) > Math.abs(ends[1].edge - 1 / r) ? ends[0] : ends[1];
  if (place === "wrong") return along(exact[y] + 0.75 * (wide.edge - exact[y]));
  if (place === "material") return along(wide.edge + 0.6 * (wide.box - wide.edge));
  return along(wide.box === r ? 0.35 * r : 1.15 / r);
}
