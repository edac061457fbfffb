/** A network with its head: what the output means. */

import { affineInverse, scoreFromPosterior } from "../simplex/uniform";
import { DiT, type DiTConfig } from "./dit";
import { softmaxRows } from "./linear";
import type { Network } from "./network";
import { Parameters } from "./parameters";
import { UNet, type UNetConfig } from "./unet";
import type { Weights } from "./weights";

/** The network sees times in [T_MIN, 1 - T_MIN], where it was trained. */
export const T_MIN = 1e-3;

/** A network whose output is a posterior (M2S) or an unconstrained score (SEDD) under uniform noise. */
export interface Model {
  /** K, the number of tokens. */
  states: number;
  /** Positions of a sequence. */
  length: number;
  /** Whether the output is a posterior. Otherwise it is a score, which need not have one. */
  hasPosterior: boolean;
  /** Returns the output of the network [length * states]. Times outside [T_MIN, 1 - T_MIN] are moved to its ends. */
  logits(tokens: Int32Array, t: number): Float64Array;
  /** Returns what the head adds to the logit of the current token, so that the logits are those of the posterior. */
  offset(t: number): number;
  /** Returns the posterior [length * states]; for an unconstrained score the signed affine inverse. */
  posterior(tokens: Int32Array, t: number): Float64Array;
  /** Returns the log-score of every candidate [length * states], 0 at the current token. */
  logScore(tokens: Int32Array, t: number): Float64Array;
}

interface Config {
  model: { kind: string } & Record<string, unknown>;
  head: { kind: string; offset?: string; scale?: string; process: { kind: string; vocab: number; schedule: { kind: string } } };
}

/** The settings of the networks that this code computes. */
const SUPPORTED: Record<string, Record<string, unknown>> = {
  unet: { mask: false, input: "embedding", time: true, classes: null, columns: null, sinusoids: "cos-first" },
  dit: { time: true, causal: false, classes: null, clock: null, constant_time: false, norm_bias: false, padding: false, qk_norm: false },
};

/**
 * Returns the model of a checkpoint.
 *
 * @throws The network, the head or the process is not one of those that the lab computes.
 */
export function makeModel(weights: Weights): Model {
  const { head, model } = weights.config as Config;
  requireOneOf("network", model.kind, Object.keys(SUPPORTED));
  for (const [name, value] of Object.entries(SUPPORTED[model.kind])) requireOneOf(`model.${name}`, model[name], [value]);
  requireOneOf("process", head.process.kind, ["Uniform"]);
  requireOneOf("schedule", head.process.schedule.kind, ["Linear"]);
  requireOneOf("head", head.kind, ["Posterior", "LogScore"]);
  if (head.kind === "Posterior") requireOneOf("offset", head.offset, ["none", "exact"]);
  if (head.kind === "LogScore") requireOneOf("scale", head.scale, ["none"]);
  const parameters = new Parameters(weights.tensors, "model.");
  const network =
    model.kind === "unet"
      ? new UNet(model as unknown as UNetConfig, parameters)
      : new DiT(model as unknown as DiTConfig, parameters);
  return new NetworkModel(network, head.process.vocab, head.kind === "Posterior", head.offset === "exact");
}

function requireOneOf(name: string, value: unknown, allowed: unknown[]): void {
  if (allowed.includes(value)) return;
  throw new Error(`the lab does not compute ${name} = ${String(value)}: expected ${allowed.join(" or ")}`);
}

class NetworkModel implements Model {
  readonly length: number;
  private seen: { tokens: Int32Array; t: number; logits: Float64Array } | null = null;

  constructor(
    private readonly network: Network,
    readonly states: number,
    readonly hasPosterior: boolean,
    private readonly exact: boolean,
  ) {
    this.length = network.length;
  }

  logits(tokens: Int32Array, t: number): Float64Array {
    const wrong = tokens.find((token) => !(token >= 0 && token < this.states));
    if (tokens.length !== this.length || wrong !== undefined) {
      const given = wrong === undefined ? `${tokens.length} tokens` : `the token ${wrong}`;
      throw new Error(`the network was given ${given}, expected ${this.length} tokens in 0..${this.states - 1}`);
    }
    const time = Math.min(Math.max(t, T_MIN), 1 - T_MIN);
    const { seen } = this; // a page asks for several results of one state
    if (seen !== null && seen.t === time && seen.tokens.every((token, i) => token === tokens[i])) return seen.logits;
    const logits = this.network.logits(tokens, time);
    this.seen = { tokens: tokens.slice(), t: time, logits };
    return logits;
  }

  offset(t: number): number {
    return this.exact ? Math.log1p(((1 - t) / t) * this.states) : 0;
  }

  posterior(tokens: Int32Array, t: number): Float64Array {
    const result = this.logits(tokens, t).slice();
    const { states } = this;
    if (this.hasPosterior) {
      const offset = this.offset(t);
      tokens.forEach((token, i) => (result[i * states + token] += offset));
      return softmaxRows(result, states);
    }
    const time = Math.min(t, 1 - T_MIN);
    return this.byPosition(result, tokens, (row, k) => affineInverse(row.map(Math.exp), k, time));
  }

  logScore(tokens: Int32Array, t: number): Float64Array {
    const time = Math.min(t, 1 - T_MIN);
    if (!this.hasPosterior) {
      return this.byPosition(this.logits(tokens, t), tokens, (row, k) => row.map((value, y) => (y === k ? 0 : value)));
    }
    const bridge = (mu: number[], k: number): number[] => scoreFromPosterior(mu, k, time).map(Math.log);
    return this.byPosition(this.posterior(tokens, time), tokens, bridge);
  }

  /** Applies a function of a vector over the states and the current token at every position. */
  private byPosition(
    values: Float64Array,
    tokens: Int32Array,
    apply: (row: number[], k: number) => number[],
  ): Float64Array {
    const { states } = this;
    const result = new Float64Array(values.length);
    tokens.forEach((token, i) => {
      result.set(apply(Array.from(values.subarray(i * states, (i + 1) * states)), token), i * states);
    });
    return result;
  }
}
