// The networks against the library: posterior and log-score at golden tokens and times.
import assert from "node:assert/strict";
import { test } from "node:test";
import { decodeWeights, makeModel } from "../../src/net/index";
import { multiply } from "../../src/net/linear";
import { NAMES, parse, readContainer, readGolden, readModel, readWeights, sha256 } from "./golden";

// The golden vectors are in float64, apart from the features of time and position. Those are float32 by definition, and their
// last bit depends on the exponential and the cosine of torch. So 1e-6 is ten times what is left.
const TOLERANCE = 1e-6;

/** Fails unless numbers agree up to an absolute error. For log-scores that is the relative error of the score. */
function same(actual: Float64Array, expected: number[], where: string): void {
  assert.equal(actual.length, expected.length, where);
  actual.forEach((value, i) => {
    assert.ok(Math.abs(value - expected[i]) <= TOLERANCE, `${where}[${i}] is ${value}, expected ${expected[i]}`);
  });
}

for (const name of NAMES) {
  test(`posterior and log-score of ${name} are those of the library`, () => {
    const golden = readGolden(name);
    assert.equal(sha256(readContainer(name)), golden.container, "the container of the weights");
    const model = readModel(name);
    for (const { t, tokens, posterior, log_score } of golden.outputs) {
      same(model.posterior(parse(tokens), t), posterior, `posterior at ${t}`);
      same(model.logScore(parse(tokens), t), log_score, `log-score at ${t}`);
    }
  });
}

test("results do not depend on earlier calls", () => {
  const { outputs } = readGolden("digits-sedd");
  const model = readModel("digits-sedd");
  const [first, second] = outputs.map((output) => parse(output.tokens));
  const before = model.logScore(first, outputs[0].t);
  model.posterior(second, outputs[1].t);
  assert.deepEqual(model.logScore(first, outputs[0].t), before);
});

test("the network sees times inside [0.001, 0.999]", () => {
  const model = readModel("digits-m2s");
  const tokens = new Int32Array(model.length).fill(3);
  assert.deepEqual(model.logits(tokens, 1), readModel("digits-m2s").logits(tokens, 0.999));
  assert.deepEqual(model.logits(tokens, 0), readModel("digits-m2s").logits(tokens, 0.001));
});

test("products of any shape are those of the definition", () => {
  const number = (i: number): number => Math.sin(12.9898 * i + 1);
  for (const [rows, inner, columns] of [[1, 3, 1], [4, 4, 4], [5, 7, 6], [9, 2, 11], [3, 5, 8]]) {
    const a = Float64Array.from({ length: rows * inner }, (_, i) => number(i));
    const b = Float64Array.from({ length: columns * inner }, (_, i) => number(i + 100));
    const bias = Float64Array.from({ length: columns }, (_, i) => number(i + 200));
    const product = multiply(a, b, bias, rows, inner, columns);
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) {
        let sum = bias[j];
        for (let k = 0; k < inner; k++) sum += a[i * inner + k] * b[j * inner + k];
        assert.ok(Math.abs(product[i * columns + j] - sum) < 1e-14);
      }
    }
  }
});

test("invalid tokens, networks and containers are errors", () => {
  const model = readModel("digits-m2s");
  assert.throws(() => model.logits(new Int32Array(63), 0.5), /63 tokens, expected 64 tokens in 0..16/);
  assert.throws(() => model.logits(new Int32Array(64).fill(17), 0.5), /the token 17/);
  const weights = readWeights("chars");
  const config = structuredClone(weights.config) as { model: { qk_norm: boolean } };
  config.model.qk_norm = true;
  assert.throws(() => makeModel({ ...weights, config }), /does not compute model.qk_norm = true: expected false/);
  assert.throws(() => makeModel({ ...weights, tensors: new Map() }), /no tensor model.condition.time.0.weight/);
  const container = readContainer("chars");
  for (const length of [0, 3, 100, 5000, container.length - 1]) {
    const cut = container.subarray(0, length).toString("base64");
    assert.throws(() => decodeWeights(cut), /fewer than they state/);
  }
});
