/** Golden vectors of the library and the models that they belong to. tests/report/lab_net_golden.py writes them. */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { decodeWeights, makeModel, type Model, type Weights } from "../../src/net/index";

export const NAMES = ["digits-m2s", "digits-m2s-offset", "digits-sedd", "chars"] as const;

/** What the library computes at one time for one state. */
interface Output {
  t: number;
  tokens: string;
  posterior: number[];
  log_score: number[];
}

/** A call of `m2s.sample`: states, classes of the scores and dropped masses of each sample at each step. */
export interface Samples {
  steps: number;
  grid: "cosine" | "linear";
  seed: number;
  start: number;
  repair: boolean;
  temperature: number;
  clamp: string[] | null;
  states: string[][];
  classes: string[][];
  dropped: number[][];
}

/** The golden vectors of one network. */
export interface Golden {
  container: string;
  outputs: Output[];
  samples: Samples[];
}

/** Returns the golden vectors of a network. */
export function readGolden(name: string): Golden {
  return JSON.parse(readFileSync(new URL(`../golden/net-${name}.json`, import.meta.url), "utf8")) as Golden;
}

/** Returns the container of built-in weights, as m2s.report.lab.weights builds it. */
export function readContainer(name: string): Buffer {
  const folder = new URL(`../../../m2s/hub/weights/${name}/`, import.meta.url);
  const config = readFileSync(new URL("config.json", folder));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(config.length);
  return Buffer.concat([length, config, readFileSync(new URL("model.safetensors", folder))]);
}

/** Returns the weights of a network. */
export function readWeights(name: string): Weights {
  return decodeWeights(readContainer(name).toString("base64"));
}

/** Returns the model of a network. */
export function readModel(name: string): Model {
  return makeModel(readWeights(name));
}

/** Returns the SHA-256 of bytes in hexadecimal. */
export function sha256(bytes: Buffer): string {
  return createHash("sha256").update(bytes).digest("hex");
}

/** Returns tokens from base 36, -1 for "-". */
export function parse(text: string): Int32Array {
  return Int32Array.from(text, (character) => (character === "-" ? -1 : parseInt(character, 36)));
}

/** Returns tokens in base 36. */
export function format(tokens: ArrayLike<number>): string {
  return Array.from(tokens, (token) => token.toString(36)).join("");
}
