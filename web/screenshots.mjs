// Takes the pictures of docs/screenshots from the built site: `make docs && npm run screenshots` in web/.
// CHROME is the path of a browser, by default that of Chromium.
import { mkdirSync, rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

import puppeteer from "puppeteer-core";

const root = join(dirname(fileURLToPath(import.meta.url)), "..");
const out = join(root, "docs", "screenshots");
const pages = {
  home: "index.html",
  notebook: "tutorials/fifteen-minutes.html",
  audit: "tutorials/audit-and-repair.html",
  concept: "concepts/realizability.html",
  guide: "training.html",
  methods: "methods.html",
  reference: "reference/heads.html",
  commands: "reference/cli.html",
  results: "results.html",
  lab: "lab/index.html",
};
const both = new Set(["home", "notebook", "lab"]);
const narrow = new Set(["home", "concept", "reference", "lab"]);
// Milliseconds: the animation of the home page is at its last step, and the lab has computed its first samples.
const wait = { home: 5000, lab: 9000 };

const browser = await puppeteer.launch({
  executablePath: process.env.CHROME ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"],
});
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const page = await browser.newPage();
for (const [name, path] of Object.entries(pages)) {
  for (const scheme of both.has(name) ? ["light", "dark"] : ["light"]) {
    for (const width of narrow.has(name) ? [1280, 400] : [1280]) {
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.setViewport({ width, height: width === 400 ? 800 : 900, deviceScaleFactor: 1 });
      await page.goto(pathToFileURL(join(root, "site", path)).href, { waitUntil: "load" });
      await new Promise((resolve) => setTimeout(resolve, wait[name] ?? 500));
      const file = `${name}${width === 400 ? "-400" : ""}${scheme === "dark" ? "-dark" : ""}.webp`;
      await page.screenshot({ path: join(out, file), type: "webp", quality: 80 });
    }
  }
}
await browser.close();
