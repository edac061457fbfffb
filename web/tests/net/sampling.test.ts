// The samplers against the library: the same seed, sample, steps and grid give the same tokens.
import assert from "node:assert/strict";
import { test } from "node:test";
import { makePlan, reverseStep, startTokens, type Model, type StepResult } from "../../src/net/index";
import { CounterNoise, philox } from "../../src/net/philox";
import { format, NAMES, parse, readGolden, readModel, type Samples } from "./golden";

// The library draws from a network in float32, with a relative error of a few 1e-6. A token differs only where a uniform number
// is that near to the end of an interval, which is so for none of the golden samples. Masses differ by that error.
const MASS_TOLERANCE = 1e-4;

/** Follows one sample of the library and compares every step. */
function follow(model: Model, golden: Samples, index: number): void {
  const { repair, seed, temperature } = golden;
  const sample = golden.start + index;
  const clamp = golden.clamp === null ? undefined : parse(golden.clamp[index]);
  const fixed = clamp === undefined ? {} : { clamp };
  const realizable = repair || model.hasPosterior;
  let tokens = startTokens(model, { seed, sample, ...fixed });
  assert.equal(format(tokens), golden.states[index][0], "the start");
  const plan = makePlan(model, golden.steps, golden.grid);
  assert.equal(plan.length, golden.states[index].length - 1);
  plan.forEach(({ t, s }, step) => {
    const where = `sample ${sample}, step ${step} of ${golden.steps}, repair ${repair}`;
    const result = reverseStep(model, tokens, t, s, { seed, sample, step, repair, temperature, ...fixed });
    const classes = [format(result.classes), golden.classes[index][step]];
    // A posterior with zeros is at the boundary, where rounding decides between the classes 2 and 3.
    if (realizable) classes.forEach((text) => assert.match(text, /^[23]*$/, `classes of ${where}`));
    else assert.equal(classes[0], classes[1], `classes of ${where}`);
    const mass = golden.dropped[index][step];
    assert.ok(Math.abs(result.droppedMass - mass) <= MASS_TOLERANCE * Math.max(1, mass), `mass of ${where}`);
    checkProbabilities(model, tokens, t, result, realizable);
    tokens = result.tokens;
    assert.equal(format(tokens), golden.states[index][step + 1], `tokens of ${where}`);
  });
}

/** Probabilities sum to one, and are not negative where there is a posterior. */
function checkProbabilities(model: Model, tokens: Int32Array, t: number, result: StepResult, positive: boolean): void {
  const { states } = model;
  tokens.forEach((_, i) => {
    const row = result.probabilities.subarray(i * states, (i + 1) * states);
    assert.ok(Math.abs(row.reduce((sum, value) => sum + value, 0) - 1) < 1e-9, `probabilities of position ${i} at ${t}`);
    if (positive) assert.ok(row.every((value) => value >= 0));
  });
}

for (const name of NAMES) {
  test(`samples of ${name} are those of the library`, () => {
    const model = readModel(name);
    for (const golden of readGolden(name).samples) golden.states.forEach((_, index) => follow(model, golden, index));
  });
}

test("Philox gives the known answers of Salmon et al. (2011)", () => {
  const ones = 0xffffffff;
  assert.deepEqual(philox([0, 0, 0, 0], [0, 0]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
  assert.deepEqual(philox([ones, ones, ones, ones], [ones, ones]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
  assert.deepEqual(
    philox([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
    [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
  );
});

test("uniform numbers are in [0, 1) and depend on every argument", () => {
  const numbers = [
    new CounterNoise(1, 2, 3).at(4, "token"),
    new CounterNoise(1 + 2 ** 32, 2, 3).at(4, "token"),
    new CounterNoise(5, 2, 3).at(4, "token"),
    new CounterNoise(1, 5, 3).at(4, "token"),
    new CounterNoise(1, 2, 5).at(4, "token"),
    new CounterNoise(1, 2, 3).at(5, "token"),
    new CounterNoise(1, 2, 3).at(4, "route"),
  ];
  assert.equal(new Set(numbers).size, numbers.length);
  assert.ok(numbers.every((number) => number >= 0 && number < 1));
});

test("a score without repair has no temperature", () => {
  const model = readModel("digits-sedd");
  const options = { seed: 0, sample: 0, step: 0, repair: false, temperature: 0.5 };
  assert.throws(() => reverseStep(model, new Int32Array(64), 0.5, 0.4, options), /switch repair on/);
});

test("clamped positions keep their tokens from the start", () => {
  const model = readModel("digits-m2s-offset");
  const clamp = new Int32Array(64).fill(-1).fill(7, 10, 20);
  const options = { seed: 3, sample: 1, clamp };
  const start = startTokens(model, options);
  assert.ok(start.subarray(10, 20).every((token) => token === 7));
  const free = startTokens(model, { seed: 3, sample: 1 }); // the noise of a free position does not depend on the clamp
  assert.deepEqual(start.subarray(20), free.subarray(20));
  const step = { ...options, step: 0, repair: false, temperature: 1 };
  const given = reverseStep(model, free, 1, 0.9, step);
  assert.deepEqual(given.tokens, reverseStep(model, start, 1, 0.9, step).tokens);
  assert.ok(given.tokens.subarray(10, 20).every((token) => token === 7));
});
