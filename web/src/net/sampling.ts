/**
 * The reverse process: `bayes` for a posterior and `analytic` for a score, as in `m2s.samplers`.
 *
 * With the seed, the number of the sample, the steps and the grid of `m2s.sample`, the tokens are the same.
 */

import * as uniform from "../simplex/uniform";
import { drawCategorical } from "./categorical";
import { T_MIN, type Model } from "./model";
import { CounterNoise } from "./philox";

const ANALYTIC_END = 1e-5; // where the grid of the analytic sampler ends; the denoiser goes from there to 0

/** A step of a plan, from time t to time s. */
export interface Move {
  t: number;
  s: number;
}

/** What a step depends on besides the state and the times. */
export interface StepOptions {
  /** Seed of the run, an integer in [0, 2^53). */
  seed: number;
  /** Number of the sample. */
  sample: number;
  /** Number of the step in the plan, from 0. */
  step: number;
  /** Tokens that stay as they are [length], -1 at free positions. */
  clamp?: Int32Array;
  /** Replace a score by that of the nearest posterior. It has no effect on a model whose output is a posterior. */
  repair: boolean;
  /** Divides the logits of the posterior; 1 for a score without repair, which has no posterior. */
  temperature: number;
}

/** The result of a step. */
export interface StepResult {
  /** Tokens at time s [length]. */
  tokens: Int32Array;
  /** The posterior at time t that the step used [length * states]; without repair of a score its signed posterior. */
  probabilities: Float64Array;
  /** Class of the score at time t at every position [length], see `CLASS_NAMES`. */
  classes: Uint8Array;
  /** Total negative mass of the step's weights over the free positions, which is dropped. */
  droppedMass: number;
}

/**
 * Returns the plan of the model's sampler: the times of every call of the network.
 *
 * The analytic sampler makes one call more than `steps`, the denoiser.
 */
export function makePlan(model: Model, steps: number, grid: "cosine" | "linear" = "cosine"): Move[] {
  const time = (m: number): number => (grid === "linear" ? 1 - m / steps : Math.cos((Math.PI * m) / (2 * steps)));
  const times = Array.from({ length: steps + 1 }, (_, m) => (m === steps ? 0 : time(m)));
  if (model.hasPosterior) return times.slice(1).map((s, m) => ({ t: times[m], s }));
  const scaled = times.map((t) => ANALYTIC_END + (1 - ANALYTIC_END) * t);
  const moves = scaled.slice(1).map((s, m) => ({ t: scaled[m], s }));
  // The denoiser inverts the noise of the score, so both are of the time that the network sees.
  return [...moves, { t: Math.max(scaled[steps], T_MIN), s: 0 }];
}

/** Draws the tokens at t = 1 from the uniform distribution; clamped positions have their tokens. */
export function startTokens(model: Model, options: { seed: number; sample: number; clamp?: Int32Array }): Int32Array {
  const noise = new CounterNoise(options.seed, options.sample, 0);
  const reference = Array<number>(model.states).fill(1 / model.states);
  const tokens = Int32Array.from({ length: model.length }, (_, i) => drawCategorical(reference, noise.at(i, "start")));
  return clamped(tokens, options.clamp);
}

/**
 * Takes one step of the reverse process.
 *
 * @param tokens Tokens at time t [length].
 * @param t Time at the start of the step, in (0, 1].
 * @param s Time at its end, at most t. At 0 the step removes all noise.
 * @throws A temperature is given for a score without repair.
 */
export function reverseStep(model: Model, tokens: Int32Array, t: number, s: number, options: StepOptions): StepResult {
  const { clamp, repair, temperature } = options;
  if (!model.hasPosterior && !repair && temperature !== 1) {
    throw new Error(`temperature ${temperature} sharpens a posterior, and a score has none: switch repair on`);
  }
  const { states } = model;
  const x = clamped(tokens, clamp);
  const logits = model.logits(x, t);
  const noise = new CounterNoise(options.seed, options.sample, options.step + 1);
  const next = new Int32Array(x.length);
  const probabilities = new Float64Array(logits.length);
  const classes = new Uint8Array(x.length);
  const scoreTime = Math.min(t, 1 - T_MIN); // at t = 1 scores and rates are infinite
  const end = Math.min(s, scoreTime);
  let droppedMass = 0;
  for (let i = 0; i < x.length; i++) {
    const k = x[i];
    const output = Array.from(logits.subarray(i * states, (i + 1) * states));
    const posterior = (time: number): number[] => softmax(added(output, k, model.offset(time)), temperature);
    let [mu, score]: number[][] = [[], []];
    if (model.hasPosterior) {
      mu = posterior(t);
      score = uniform.scoreFromPosterior(t === scoreTime ? mu : posterior(scoreTime), k, scoreTime);
      next[i] = bayesStep(mu, k, s, t, noise, i);
    } else {
      score = output.map((value, y) => (y === k ? 1 : Math.exp(value)));
      mu = uniform.affineInverse(score, k, scoreTime);
      if (repair) {
        mu = softmax(uniform.project(score, k, scoreTime).map(Math.log), temperature);
        score = uniform.scoreFromPosterior(mu, k, scoreTime);
      }
      const weights = uniform.analyticWeights(score, k, end, scoreTime);
      if (clamp === undefined || clamp[i] < 0) droppedMass -= weights.reduce((sum, value) => sum + Math.min(0, value), 0);
      next[i] = drawCategorical(repair && s <= 0 ? mu : uniform.positivePart(weights), noise.at(i, "token"));
    }
    probabilities.set(mu, i * states);
    classes[i] = uniform.diagnose(score, k, scoreTime).class;
  }
  return { tokens: clamped(next, clamp), probabilities, classes, droppedMass };
}

/**
 * Draws from the Bayes step (Eq. 19), a mixture of three routes; at s = 0 from mu.
 *
 * With q = P_{t|s}(k|y) for y != k and N = sum_z mu_z / P_t(k|z): go to a draw z ~ mu with weight q alpha_s / m_t, jump to a
 * uniform token with weight q (1 - alpha_s) N, or stay.
 */
function bayesStep(mu: number[], k: number, s: number, t: number, noise: CounterNoise, position: number): number {
  const states = mu.length;
  const drawn = drawCategorical(mu, noise.at(position, "token"));
  if (s <= 0) return drawn;
  const mixing = t / states;
  const into = (t - s) / (1 - s) / states;
  const off = mu.reduce((sum, value, z) => (z === k ? sum : sum + value), 0);
  const go = (into * (1 - s)) / mixing;
  const leave = go + into * s * (off / mixing + mu[k] / (1 - t + mixing));
  const route = noise.at(position, "route");
  if (route < go) return drawn;
  return route < leave ? Math.min(Math.floor(noise.at(position, "jump") * states), states - 1) : k;
}

/** Returns the vector with a number added to entry k. */
function added(values: number[], k: number, number: number): number[] {
  return values.map((value, y) => (y === k ? value + number : value));
}

/** Returns softmax(logits / temperature). */
function softmax(logits: number[], temperature: number): number[] {
  const top = Math.max(...logits);
  const weights = logits.map((value) => Math.exp((value - top) / temperature));
  const total = weights.reduce((sum, value) => sum + value, 0);
  return weights.map((value) => value / total);
}

/** Returns the tokens with those of the clamp where it is not -1. */
function clamped(tokens: Int32Array, clamp: Int32Array | undefined): Int32Array {
  return tokens.map((token, i) => (clamp !== undefined && clamp[i] >= 0 ? clamp[i] : token));
}
