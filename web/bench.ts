// Measures the forward passes of the lab: `npm run bench` prints the times and writes benchmarks/results/lab.json.
import { writeFileSync } from "node:fs";
import { cpus } from "node:os";
import { decodeWeights, makeModel, makePlan, reverseStep, startTokens } from "./src/net/index";
import { readContainer } from "./tests/net/golden";

const REPEATS = 31;
const FILE = new URL("../benchmarks/results/lab.json", import.meta.url);

/** Returns the processor time of this process in milliseconds, which other programs on the machine do not add to. */
function processorTime(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
}

/** Returns the first, the least and the median time of some calls. The first one also compiles. */
function measure(call: (repeat: number) => void): { first_ms: number; best_ms: number; median_ms: number } {
  const times = Array.from({ length: REPEATS }, (_, repeat) => {
    const begin = processorTime();
    call(repeat);
    return processorTime() - begin;
  });
  const sorted = times.slice(1).sort((a, b) => a - b);
  return { first_ms: times[0], best_ms: sorted[0], median_ms: sorted[sorted.length >> 1] };
}

const networks = ["digits-m2s-offset", "digits-sedd", "chars"].map((name) => {
  const container = readContainer(name);
  const text = container.toString("base64");
  const begin = processorTime();
  const model = makeModel(decodeWeights(text));
  const load_ms = processorTime() - begin;
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
  what: "processor time for one sequence, in float64: a forward pass, and a step of the reverse process, which has one",
  node: process.version,
  cpu: cpus()[0].model,
  repeats: REPEATS,
  networks,
};
writeFileSync(FILE, `${JSON.stringify(result, null, 1)}\n`);
