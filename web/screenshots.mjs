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
  tutorials: "tutorials/index.html",
  notebook: "tutorials/fifteen-minutes.html",
  audit: "tutorials/audit-and-repair.html",
  concepts: "concepts/index.html",
  concept: "concepts/realizability.html",
  guide: "training.html",
  methods: "methods.html",
  reference: "reference/heads.html",
  commands: "reference/cli.html",
  results: "results.html",
  testing: "testing.html",
  faq: "faq.html",
  "lab-simplex": "lab/index.html",
  "lab-digits": "lab/index.html#digits",
  "lab-text": "lab/index.html#text",
};
const labs = Object.keys(pages).filter((name) => name.startsWith("lab-"));
const both = new Set(["home", "notebook", "methods", ...labs]);
const narrow = new Set(["home", "concept", "reference", ...labs]);
const LINE = [10, 18, 26, 34, 42, 50]; // pixels of a vertical stroke
const WORDS = { 23: "_daughter_", 78: "_king_" }; // and where they begin; _ is a space

// What happens on a page before its picture is taken.
const prepare = {
  home: () => new Promise((resolve) => setTimeout(resolve, 5000)), // the animation is at its last step
  "lab-digits": async (page) => {
    await finished(page, "digits");
    const cells = await page.$$("#paint .cell");
    for (const pixel of LINE) {
      await cells[pixel].focus();
      await page.keyboard.press("Space");
    }
    await finished(page, "digits");
    await choose(page, "#digits-player input", 13);
    await below(page, "#shares-sedd");
  },
  "lab-text": async (page) => {
    await finished(page, "text");
    const cells = await page.$$(".character");
    for (const [position, word] of Object.entries(WORDS)) {
      await cells[position].focus();
      await page.keyboard.type(word);
    }
    await page.click("#text-again");
    await finished(page, "text");
    await choose(page, "#text-player input", 28);
    await cells[21].focus();
    await below(page, "#reading");
  },
};

/** Waits until a part of the lab shows its finished sample. */
function finished(page, part) {
  return page.waitForFunction(
    (name) =>
      document.querySelector(`#${name}-status`).textContent === "" &&
      document.querySelector(`#${name}-player output`).textContent === "finished",
    { polling: 50 },
    part,
  );
}

/** Scrolls to the top of a wide page, and to an element of a narrow one. */
function below(page, selector) {
  return page.$eval(selector, (element) => (innerWidth > 400 ? scrollTo(0, 0) : element.scrollIntoView({ block: "end" })));
}

/** Moves a slider. */
function choose(page, selector, value) {
  return page.$eval(
    selector,
    (element, to) => {
      element.value = String(to);
      element.dispatchEvent(new Event("input", { bubbles: true }));
    },
    value,
  );
}

const browser = await puppeteer.launch({
  executablePath: process.env.CHROME ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars"],
});
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
for (const [name, path] of Object.entries(pages)) {
  for (const scheme of both.has(name) ? ["light", "dark"] : ["light"]) {
    for (const width of narrow.has(name) ? [1280, 400] : [1280]) {
      const page = await browser.newPage();
      await page.emulateMediaFeatures([
        { name: "prefers-color-scheme", value: scheme },
        { name: "prefers-reduced-motion", value: name.startsWith("lab-") ? "reduce" : "no-preference" },
      ]);
      await page.setViewport({ width, height: width === 400 ? 800 : 900, deviceScaleFactor: 1 });
      const [file, hash] = path.split("#");
      const address = pathToFileURL(join(root, "site", file)).href + (hash ? `#${hash}` : "");
      await page.goto(address, { waitUntil: "load" });
      await (prepare[name]?.(page) ?? new Promise((resolve) => setTimeout(resolve, 500)));
      const picture = `${name}${width === 400 ? "-400" : ""}${scheme === "dark" ? "-dark" : ""}.webp`;
      await page.screenshot({ path: join(out, picture), type: "webp", quality: 80 });
      await page.close();
    }
  }
}
await browser.close();
