// Measures how soon the lab answers: `npm run measure` opens the built page in a browser and writes benchmarks/results/lab-page.json.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { cpus, tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { launch, Visit } from "./tests/browser/page";

const VISITS = 11;
const FILE = new URL("../benchmarks/results/lab-page.json", import.meta.url);
const BUNDLE = new URL("../m2s/report/lab/", import.meta.url);

interface Times {
  /** From the start of the navigation until the page listens. */
  ready_ms: number;
  /** From the start of the navigation until the page has answered a first press of an arrow key. */
  first_interaction_ms: number;
  /** How long the answer to that press took. */
  answer_ms: number;
}

/** Presses an arrow key as soon as the page listens, and returns the times. Runs in the page. */
function press(): Times {
  const handle = document.querySelector("#plane .handle")!;
  const begin = performance.now();
  handle.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true }));
  document.body.getBoundingClientRect(); // the layout of what has changed
  const end = performance.now();
  const [mark] = performance.getEntriesByName("m2s-lab-ready");
  // The press follows the mark at once; the wait of this program for the browser is not the page's.
  return { ready_ms: mark.startTime, first_interaction_ms: mark.startTime + end - begin, answer_ms: end - begin };
}

const browser = await launch();
const folder = mkdtempSync(join(tmpdir(), "lab-"));
const times: Times[] = [];
const version = await browser.version();
try {
  for (const name of ["index.html", "lab.js", "lab.css"]) writeFileSync(join(folder, name), readFileSync(new URL(name, BUNDLE)));
  while (times.length < VISITS) {
    const visit = await Visit.open(browser, pathToFileURL(join(folder, "index.html")).href);
    times.push(await visit.page.evaluate(press));
    if (visit.problems.length) throw new Error(visit.problems.join("\n"));
    await visit.close();
  }
} finally {
  rmSync(folder, { recursive: true });
  await browser.close();
}
const median = (name: keyof Times): number => times.map((one) => one[name]).sort((a, b) => a - b)[VISITS >> 1];
const worst = (name: keyof Times): number => Math.max(...times.map((one) => one[name]));
const names = ["ready_ms", "first_interaction_ms", "answer_ms"] as const;
const result = {
  what: "milliseconds from the start of the navigation, in a new browser context for each visit",
  revision: execFileSync("git", ["rev-parse", "HEAD"], { encoding: "utf8" }).trim(),
  browser: version,
  cpu: cpus()[0].model,
  visits: VISITS,
  bundle_bytes: Object.fromEntries(["index.html", "lab.js", "lab.css"].map((name) => [name, readFileSync(new URL(name, BUNDLE)).length])),
  median: Object.fromEntries(names.map((name) => [name, median(name)])),
  worst: Object.fromEntries(names.map((name) => [name, worst(name)])),
};
writeFileSync(FILE, `${JSON.stringify(result, null, 1)}\n`);
console.log(`first interaction after ${result.median.first_interaction_ms.toFixed(0)} ms (median of ${VISITS} visits)`);
