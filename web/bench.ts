// Measures the forward passes of the lab on one core: `npm run bench` prints the times and writes benchmarks/results/lab.json.
import { writeFileSync } from "node:fs";
import { cpus } from "node:os";
import { decodeWeights, makeModel, makePlan, reverseStep, startTokens } from "./src/net/index";
import { readContainer } from "./tests/net/golden";

const REPEATS = 31;
const FILE = new URL("../benchmarks/results/lab.json", import.meta.url);

/** Returns the least, the median and the first time of some calls in milliseconds. The first one is slower: nothing is compiled. */
function measure(call: (repeat: number) => void): { first_ms: number; best_ms: number; median_ms: number } {
  const times = Array.from({ length: REPEATS }, (_, repeat) => {
    const begin = performance.now();
    call(repeat);
    return performance.now() - begin;
  });
  const sorted = times.slice(1).sort((a, b) => a - b);
  return { first_ms: times[0], best_ms: sorted[0], median_ms: sorted[sorted.length >> 1] };
}

const networks = ["digits-m2s-offset", "digits-sedd", "chars"].map((name) => {
  const container = readContainer(name);
  const text = container.toString("base64");
  const begin = performance.now();
  const model = makeModel(decodeWeights(text));
  const load_ms = performance.now() - begin;
  const tokens = startTokens(model, { seed: 0, sample: 0 });
  const [{ t, s }] = makePlan(model, 16).slice(8);
  // A time of its own for each repeat, because a model keeps its last result.
  const forward = measure((repeat) => model.logits(tokens, 0.1 + repeat / 100));
  const options = { seed: 0, sample: 0, step: 8, repair: !model.hasPosterior, temperature: 1 };
  const step = measure((repeat) => reverseStep(model, tokens, t - repeat / 1000, s - repeat / 1000, options));
  const row = { name, positions: model.length, script_bytes: text.length, load_ms, forward, step };
  console.log(`${name}: forward ${forward.median_ms.toFixed(1)} ms, step ${step.median_ms.toFixed(1)} ms`);
  return row;
});

const result = {
  command: "npm run bench",
  what: "one sequence, in float64, on one core: a forward pass, and a step of the reverse process, which has one forward pass",
  node: process.version,
  cpu: cpus()[0].model,
  repeats: REPEATS,
  networks,
};
writeFileSync(FILE, `${JSON.stringify(result, null, 1)}\n`);
