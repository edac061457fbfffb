/** The diffusion transformer of `m2s.models.dit` for one sequence. */

import { Condition } from "./condition";
import { applyLinear, attend, silu, type Linear } from "./linear";
import type { Network } from "./network";
import type { Parameters } from "./parameters";

const EPSILON = 1e-5;
const SLOWEST = 10_000;
const GELU_SCALE = Math.sqrt(2 / Math.PI);

/** The part of the configuration of a transformer that its forward pass depends on. */
export interface DiTConfig {
  states: number;
  width: number;
  depth: number;
  heads: number;
  length: number;
}

/** LayerNorm without bias, then (1 + scale) and shift of the modulation. */
function modulatedNorm(x: Float64Array, weight: Float64Array, shift: Float64Array, scale: Float64Array): Float64Array {
  const width = weight.length;
  const result = new Float64Array(x.length);
  for (let row = 0; row < x.length; row += width) {
    let mean = 0;
    for (let i = 0; i < width; i++) mean += x[row + i];
    mean /= width;
    let variance = 0;
    for (let i = 0; i < width; i++) variance += (x[row + i] - mean) ** 2;
    const factor = 1 / Math.sqrt(variance / width + EPSILON);
    for (let i = 0; i < width; i++) {
      result[row + i] = (x[row + i] - mean) * factor * weight[i] * (1 + scale[i]) + shift[i];
    }
  }
  return result;
}

/** Adds a gated branch to x in place. */
function addBranch(x: Float64Array, branch: Float64Array, gate: Float64Array): void {
  for (let i = 0; i < x.length; i++) x[i] += gate[i % gate.length] * branch[i];
}

/** Replaces x by gelu(x), in its form with tanh. */
function gelu(x: Float64Array): Float64Array {
  for (let i = 0; i < x.length; i++) {
    const value = x[i];
    // 1 + tanh(a) = 2 / (1 + exp(-2a))
    x[i] = value / (1 + Math.exp(-2 * GELU_SCALE * (value + 0.044715 * value * value * value)));
  }
  return x;
}

/** Cosines and sines of the rotary angles p 10000^(-2i/width), [length, width / 2] each, rounded as in the library. */
function rotaryTables(length: number, width: number): { cos: Float64Array; sin: Float64Array } {
  const half = width / 2;
  const cos = new Float64Array(length * half);
  const sin = new Float64Array(length * half);
  for (let i = 0; i < half; i++) {
    const frequency = Math.fround(SLOWEST ** Math.fround((-2 * i) / width));
    for (let position = 0; position < length; position++) {
      const angle = Math.fround(position * frequency);
      cos[position * half + i] = Math.fround(Math.cos(angle));
      sin[position * half + i] = Math.fround(Math.sin(angle));
    }
  }
  return { cos, sin };
}

/** A block: attention and MLP, each with a norm, a shift, a scale and a gate. */
class Block {
  private readonly norm1: Float64Array;
  private readonly norm2: Float64Array;
  private readonly qkv: Linear;
  private readonly out: Linear;
  private readonly widen: Linear;
  private readonly narrow: Linear;
  private readonly modulation: Linear;

  constructor(
    parameters: Parameters,
    private readonly heads: number,
  ) {
    this.norm1 = parameters.values("norm1.weight");
    this.norm2 = parameters.values("norm2.weight");
    this.qkv = parameters.linear("attention.qkv");
    this.out = parameters.linear("attention.out");
    this.widen = parameters.linear("mlp.0");
    this.narrow = parameters.linear("mlp.2");
    this.modulation = parameters.linear("modulation.linear");
  }

  /** Adds both branches to x [length, width] in place. */
  apply(x: Float64Array, condition: Float64Array, cos: Float64Array, sin: Float64Array): void {
    const parts = chunks(applyLinear(this.modulation, condition), 6);
    const [shift1, scale1, gate1, shift2, scale2, gate2] = parts as Six;
    addBranch(x, this.attention(modulatedNorm(x, this.norm1, shift1, scale1), cos, sin), gate1);
    const hidden = gelu(applyLinear(this.widen, modulatedNorm(x, this.norm2, shift2, scale2)));
    addBranch(x, applyLinear(this.narrow, hidden), gate2);
  }

  private attention(x: Float64Array, cos: Float64Array, sin: Float64Array): Float64Array {
    const { inputs } = this.qkv;
    const length = x.length / inputs;
    const width = inputs / this.heads;
    const joint = applyLinear(this.qkv, x);
    const mixed = new Float64Array(x.length);
    for (let head = 0; head < this.heads; head++) {
      const [q, k, v] = [0, 1, 2].map((part) => {
        const rows = new Float64Array(length * width);
        for (let i = 0; i < length; i++) {
          const from = (3 * i + part) * inputs + head * width;
          rows.set(joint.subarray(from, from + width), i * width);
        }
        return rows;
      }) as [Float64Array, Float64Array, Float64Array];
      rotate(q, width, cos, sin);
      rotate(k, width, cos, sin);
      const result = attend(q, k, v, width);
      for (let i = 0; i < length; i++) mixed.set(result.subarray(i * width, (i + 1) * width), i * inputs + head * width);
    }
    return applyLinear(this.out, mixed);
  }
}

type Six = [Float64Array, Float64Array, Float64Array, Float64Array, Float64Array, Float64Array];

function chunks(x: Float64Array, count: number): Float64Array[] {
  const size = x.length / count;
  return Array.from({ length: count }, (_, i) => x.subarray(i * size, (i + 1) * size));
}

/** Rotates the pairs (x_i, x_{i + width/2}) by the angles of their position, in place. */
function rotate(x: Float64Array, width: number, cos: Float64Array, sin: Float64Array): void {
  const half = width / 2;
  for (let row = 0, at = 0; row < x.length; row += width) {
    for (let i = 0; i < half; i++, at++) {
      const [a, b] = [x[row + i], x[row + half + i]];
      x[row + i] = a * cos[at] - b * sin[at];
      x[row + half + i] = b * cos[at] + a * sin[at];
    }
  }
}

/** A transformer with time and gates, without classes, padding and norms of queries and keys. */
export class DiT implements Network {
  readonly length: number;
  private readonly condition: Condition;
  private readonly embedding: Float64Array;
  private readonly blocks: Block[];
  private readonly norm: Float64Array;
  private readonly modulation: Linear;
  private readonly head: Linear;
  private readonly cos: Float64Array;
  private readonly sin: Float64Array;

  constructor(
    private readonly config: DiTConfig,
    parameters: Parameters,
  ) {
    const { depth, heads, states, width } = config;
    this.length = config.length;
    this.condition = new Condition(parameters.at("condition"));
    this.embedding = parameters.values("embedding.weight");
    this.blocks = Array.from({ length: depth }, (_, i) => new Block(parameters.at("blocks").at(i), heads));
    this.norm = parameters.values("norm.weight");
    this.modulation = parameters.linear("modulation.linear");
    const padded = parameters.linear("head");
    const weight = padded.weight.subarray(0, states * width);
    this.head = { inputs: width, outputs: states, weight, bias: padded.bias!.subarray(0, states) };
    ({ cos: this.cos, sin: this.sin } = rotaryTables(this.length, width / heads));
  }

  logits(tokens: Int32Array, t: number): Float64Array {
    const { width } = this.config;
    const c = silu(this.condition.at(t));
    const x = new Float64Array(tokens.length * width);
    tokens.forEach((token, i) => x.set(this.embedding.subarray(token * width, (token + 1) * width), i * width));
    for (const block of this.blocks) block.apply(x, c, this.cos, this.sin);
    const [shift, scale] = chunks(applyLinear(this.modulation, c), 2) as [Float64Array, Float64Array];
    return applyLinear(this.head, modulatedNorm(x, this.norm, shift, scale));
  }
}
