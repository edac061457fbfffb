// The page in a browser: pointer, touch and keyboard, both color schemes, wide and narrow, from the disk and from a server.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import type { Browser } from "puppeteer-core";
import { addresses, launch, Visit, type Options } from "./page";

let browser: Browser;
before(async () => {
  browser = await launch();
});
after(async () => browser.close());

/** Runs a test on a visit, and checks what holds for all: no message in the console, and no request to elsewhere. */
async function visiting(address: string, options: Options, body: (visit: Visit) => Promise<void>): Promise<void> {
  const visit = await Visit.open(browser, address, options);
  await body(visit);
  assert.deepEqual(visit.problems, []);
  const folder = address.replace(/[^/]*$/, "").replace(/index\.html.*$/, "");
  for (const url of visit.requests) assert.ok(/^(data|blob):/.test(url) || url.startsWith(folder), url);
  await visit.close();
}

const sum = (values: number[]): number => values.reduce((total, value) => total + value, 0);
const PARTS = ["simplex", "digits", "text"] as const;

const [address, served] = addresses();

for (const [place, from] of [
  ["disk", address],
  ["server", served],
] as const) {
  test(`${place}: the score follows the pointer and the arrow keys in both pictures`, () =>
    visiting(from, {}, async (visit) => {
      const { page } = visit;
      assert.equal(await visit.text("#verdict"), "material");
      const signed = await visit.bars("#posterior-bars");
      assert.ok(Math.min(...signed) < 0 && Math.abs(sum(signed) - 2) < 0.01); // two series, and each has the sum one
      for (const picture of ["#plane", "#ternary"]) {
        const start = await visit.middle(`${picture} .handle .mark`);
        const to = await visit.middle(`${picture} .exact`);
        await page.mouse.move(...start);
        await page.mouse.down();
        await page.mouse.move((start[0] + to[0]) / 2, (start[1] + to[1]) / 2);
        await page.mouse.move(...to);
        await page.mouse.up();
        assert.equal(await visit.text("#verdict"), "realizable");
        const [data, asIs, repaired] = [0, 1, 2].map((series) => [0, 1, 2].map((token) => token * 3 + series));
        const generated = await visit.bars("#generated-bars");
        for (const series of [asIs, repaired]) {
          series.forEach((at, token) => assert.ok(Math.abs(generated[at] - generated[data[token]]) < 0.02, picture));
        }
        await visit.focus(`${picture} .handle`);
        await page.keyboard.down("Shift");
        for (let press = 0; press < 9; press++) await page.keyboard.press("ArrowRight");
        await page.keyboard.up("Shift");
        assert.notEqual(await visit.text("#verdict"), "realizable");
        const [before] = await visit.attributes(`${picture} .handle`, "aria-valuetext");
        await page.keyboard.press("ArrowDown");
        assert.notEqual((await visit.attributes(`${picture} .handle`, "aria-valuetext"))[0], before);
      }
      await page.keyboard.press("Home");
      assert.match(await visit.text("#loss"), /^The loss is 0\.000 nats/);
    }));

  test(`${place}: weights are loaded when their part is opened, and tabs follow the keyboard and the address`, () =>
    visiting(from, {}, async (visit) => {
      const { page } = visit;
      await visit.choose("#time", "0.3");
      assert.deepEqual(visit.weights(), []);
      await visit.focus("#tab-simplex");
      await page.keyboard.press("ArrowRight");
      await visit.finished("digits");
      assert.deepEqual(visit.weights(), ["digits-m2s-offset", "digits-sedd"]);
      assert.ok(page.url().endsWith("#digits"));
      await page.click("#tab-text");
      await visit.finished("text");
      assert.deepEqual(visit.weights(), ["chars", "digits-m2s-offset", "digits-sedd"]);
      await page.goBack();
      for (const part of PARTS) {
        assert.equal(await page.$eval(`#${part}`, (panel) => (panel as HTMLElement).hidden), part !== "digits", part);
        assert.deepEqual(await visit.attributes(`#tab-${part}`, "aria-selected"), [String(part === "digits")]);
      }
    }));
}

test("buttons and sliders of the simplex", () =>
  visiting(address, {}, async (visit) => {
    const { page } = visit;
    const classes = { exact: "realizable", wrong: "realizable", material: "material", outside: "outside" };
    for (const token of [0, 1, 2]) {
      await page.click(`#token label:nth-of-type(${token + 1})`);
      for (const t of ["0.05", "0.4", "0.95"]) {
        await visit.choose("#time", t);
        for (const [name, verdict] of Object.entries(classes)) {
          await page.click(`[data-place=${name}]`);
          await page.waitForFunction((wanted) => document.querySelector("#verdict")?.textContent === wanted, { polling: 20 }, verdict);
        }
      }
    }
    await visit.choose("#time", "0.3");
    // Each place has another class than the one before, so that its verdict shows that it was reached.
    for (const place of ["outside", "exact", "material", "wrong", "outside"] as const) {
      await page.click(`[data-place=${place}]`);
      await page.waitForFunction((wanted) => document.querySelector("#verdict")?.textContent === wanted, { polling: 20 }, classes[place]);
      if (place === "exact") assert.match(await visit.text("#generated-text"), /^Total variation from the data: 0\.000 as it is, 0\.000 repaired\.$/);
      assert.equal((await visit.text("#generated-text")).includes("At other times and tokens"), place === "wrong", place);
    }
    await visit.choose("#time", "0.95");
    await visit.focus("#steps");
    await page.keyboard.press("End");
    assert.equal(await visit.text("#steps-value"), "∞");
    await page.keyboard.press("Home");
    assert.match(await visit.text("#weight-text"), /Step from t = 0\.95 to 0\.00/);
    assert.ok(Math.abs(sum(await visit.bars("#weight-bars")) - 1) < 0.01);
  }));

test("painted pixels stay in both images, and repair removes every frame", () =>
  visiting(`${address}#digits`, {}, async (visit) => {
    const { page } = visit;
    await visit.finished("digits");
    const shown = (id: string): Promise<string[]> =>
      page.$$eval(`#image-${id} .cell`, (cells) => cells.map((cell) => (cell as HTMLElement).style.getPropertyValue("--level")));
    const [m2s, sedd] = [await shown("m2s"), await shown("sedd")];
    assert.notDeepEqual(m2s, sedd);

    const [from, to] = [await visit.middle("#paint .cell", 16), await visit.middle("#paint .cell", 23)];
    await page.mouse.move(...from);
    await page.mouse.down();
    await page.mouse.move(...to, { steps: 20 });
    await page.mouse.up();
    await page.keyboard.press("ArrowDown"); // the first pressed cell has the focus
    await page.keyboard.press("Space");
    await page.waitForFunction(() => document.querySelectorAll("#image-sedd .fixed").length === 9, { polling: 20 });
    await visit.finished("digits");
    const wanted = [16, 17, 18, 19, 20, 21, 22, 23, 24];
    for (const id of ["m2s", "sedd"]) {
      const levels = await shown(id);
      for (const pixel of wanted) assert.equal(levels[pixel], "100%", `${id} ${pixel}`);
    }
    await visit.choose("#digits-player input", "6");
    assert.match(await visit.text("#text-sedd"), /^\d+ of 55 scores have no posterior/); // no step uses those of painted pixels
    assert.equal(await page.$$eval("#image-sedd .fixed.class-0, #image-sedd .fixed.class-1", (cells) => cells.length), 0);
    assert.match(await visit.text("#pixel-text"), /The pixel is fixed/);
    await visit.choose("#digits-player input", "17");
    await page.keyboard.press("Delete");
    await page.waitForFunction(() => document.querySelectorAll("#image-m2s .fixed").length === 8, { polling: 20 });
    await page.click("#paint-clear");
    await page.waitForFunction(() => document.querySelectorAll(".image .fixed").length === 0, { polling: 20 });
    await visit.finished("digits");
    assert.deepEqual([await shown("m2s"), await shown("sedd")], [m2s, sedd]); // the same noise gives the same images

    await visit.choose("#digits-player input", "6");
    const frames = (id: string): Promise<number> =>
      page.$$eval(`#image-${id} .cell`, (cells) => cells.filter((cell) => /class-[01]/.test(cell.className)).length);
    assert.equal(await frames("m2s"), 0);
    assert.ok((await frames("sedd")) > 0);
    assert.match(await visit.text("#text-sedd"), /scores have no posterior/);
    await page.click("#digits-classes");
    assert.equal(await frames("sedd"), 0);
    await page.click("#digits-classes");
    await page.click("#digits-repair");
    await page.waitForFunction(() => document.querySelector("#text-sedd")?.textContent === "All 64 scores have a posterior.", { polling: 20 });
    assert.equal(await frames("sedd"), 0);
    await visit.choose("#digits-player input", "17");
    await visit.finished("digits");
    assert.deepEqual(await shown("m2s"), m2s);
    assert.notDeepEqual(await shown("sedd"), sedd);

    await visit.focus("#image-sedd .cell");
    await page.keyboard.press("End");
    assert.equal(await visit.text("#pixel-title"), "Pixel in row 1, column 8");
  }));

test("characters are fixed by a click and by letters, and stay", () =>
  visiting(`${address}#text`, {}, async (visit) => {
    const { page } = visit;
    await visit.finished("text");
    assert.equal(await page.evaluate(() => scrollY), 0);
    const shown = (): Promise<string> => page.$$eval(".character", (cells) => cells.map((cell) => cell.textContent).join(""));
    const first = await shown();
    assert.equal(first.length, 128);
    assert.match(first, /^[a-z\u00a0]+$/);
    await page.mouse.click(...(await visit.middle(".character", 40)));
    await page.keyboard.press("ArrowRight");
    await page.keyboard.type("cat_dog");
    assert.match(await visit.text("#text-status"), /^8 characters are fixed/);
    await page.click("#text-again");
    await visit.finished("text");
    const second = await shown();
    assert.equal(second.slice(40, 48), `${first[40]}cat\u00a0dog`);
    assert.notEqual(second, first);
    await visit.choose("#text-player input", "20");
    const [place1, place2] = [await visit.middle(".character", 3), await visit.middle(".character", 99)];
    await page.mouse.move(...place1);
    assert.equal(await visit.text("#character-title"), "Position 4");
    const likely = await visit.bars("#character-bars");
    assert.ok(likely.length === 6 && sum(likely) <= 1.003 && likely.every((value, i) => i === 0 || value <= likely[i - 1]));
    await page.mouse.move(...place2);
    assert.equal(await visit.text("#character-title"), "Position 100");
    await page.click("#text-free");
    await visit.finished("text");
    assert.equal(await shown(), first);
    await page.type("#prompt", "Once, upon");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll(".character[aria-pressed=true]").length === 9, { polling: 20 });
    await visit.finished("text");
    assert.ok((await visit.text("#reading")).startsWith("once upon"));
  }));

for (const width of [400, 1280]) {
  for (const dark of [false, true]) {
    test(`${width} pixels, ${dark ? "dark" : "light"}: nothing scrolls sideways, and all text has contrast`, () =>
      visiting(address, { width, dark, touch: width === 400 }, async (visit) => {
        const { page } = visit;
        for (const part of PARTS) {
          await page.click(`#tab-${part}`);
          if (part !== "simplex") {
            await visit.finished(part);
            await visit.choose(`#${part}-player input`, "9");
          }
          assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= width, part);
          assert.deepEqual(await page.evaluate(lowContrast), [], part);
        }
        const background = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        assert.equal(sum(background.match(/\d+/g)!.map(Number)) < 384, dark);
        assert.deepEqual(await visit.attributes("#theme", "aria-pressed"), [String(dark)]);
        await page.click("#theme");
        const other = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        assert.equal(sum(other.match(/\d+/g)!.map(Number)) < 384, !dark);
        await page.reload();
        assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), other);
      }));
  }
}

/** Returns visible texts whose contrast to the background is below 4.5 (WCAG AA), or 3 where they are large. Runs in the page. */
function lowContrast(): string[] {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true })!;
  const rgb = (color: string): number[] => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return Array.from(context.getImageData(0, 0, 1, 1).data);
  };
  const luminance = (color: number[]): number => {
    const [r, g, b] = color.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found: string[] = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement!;
    if (!node.textContent!.trim() || !element.checkVisibility() || element.closest("svg")) continue;
    const style = getComputedStyle(element);
    let back: Element | null = element;
    while (back && rgb(getComputedStyle(back).backgroundColor)[3] < 255) back = back.parentElement;
    const lights = [rgb(style.color), rgb(back ? getComputedStyle(back).backgroundColor : "white")].map(luminance);
    const contrast = (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
    const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
    if (contrast < (isLarge ? 3 : 4.5)) found.push(`${contrast.toFixed(2)}: ${node.textContent!.trim()}`);
  }
  return found;
}

test("the colors are those chosen in the documentation, until they are chosen here", () =>
  visiting(served, { dark: false }, async (visit) => {
    const { page } = visit;
    const theme = (): Promise<string | undefined> => page.evaluate(() => document.documentElement.dataset.theme);
    const palette = (index: number, scheme: string): Promise<void> =>
      page.evaluate((...chosen) => {
        const key = `${new URL("..", location.href).pathname}.__palette`;
        localStorage.setItem(key, JSON.stringify({ index: chosen[0], color: { scheme: chosen[1] } }));
      }, index, scheme);
    for (const [index, scheme, wanted] of [[2, "slate", "dark"], [1, "default", "light"], [0, "default", undefined]] as const) {
      await palette(index, scheme);
      await page.reload();
      assert.equal(await theme(), wanted);
    }
    await palette(2, "slate");
    await page.reload();
    await page.click("#theme");
    await page.reload();
    assert.equal(await theme(), "light");
  }));

test("a finger drags the score and paints", () =>
  visiting(address, { width: 400, touch: true }, async (visit) => {
    const { page } = visit;
    const [from, to] = [await visit.middle("#plane .handle .mark"), await visit.middle("#plane .exact")];
    await visit.swipe(from, to);
    assert.equal(await visit.text("#verdict"), "realizable");
    await page.tap("#tab-digits");
    await visit.finished("digits");
    const pixels = [await visit.middle("#paint .cell", 27), await visit.middle("#paint .cell", 28)];
    await visit.swipe(pixels[0], pixels[1]);
    await page.waitForFunction(() => document.querySelectorAll("#image-m2s .fixed").length === 2, { polling: 20 });
    await page.tap("#tab-text");
    await visit.finished("text");
    await page.touchscreen.tap(...(await visit.middle(".character", 5)));
    assert.deepEqual((await visit.attributes(".character", "aria-pressed")).slice(4, 7), ["false", "true", "false"]);
  }));

test("on a phone the step slider stays in view above the pictures that it moves", () =>
  visiting(address, { width: 400, touch: true }, async (visit) => {
    const { page } = visit;
    for (const [part, below] of [["digits", "#image-sedd"], ["text", "#reading"]] as const) {
      await page.tap(`#tab-${part}`);
      await visit.finished(part);
      await page.$eval(below, (element) => element.scrollIntoView({ block: "end" }));
      const [header, player, picture] = await page.evaluate(
        (...selectors) => selectors.map((selector) => document.querySelector(selector)!.getBoundingClientRect()).map(({ top, bottom }) => [top, bottom]),
        "header",
        `#${part}-player`,
        below,
      );
      assert.ok(header[1] <= player[0] + 1 && player[1] < picture[0], `${part}: ${header}, ${player}, ${picture}`);
      await visit.choose(`#${part}-player input`, "4");
      assert.match(await visit.text(`#${part}-player output`), /^4 of /);
    }
  }));

test("every control has a name, and the focus is visible", () =>
  visiting(address, {}, async (visit) => {
    const { page } = visit;
    for (const part of PARTS) {
      await page.click(`#tab-${part}`);
      if (part !== "simplex") await visit.finished(part);
      const tree = await page.accessibility.snapshot({ interestingOnly: true });
      const unnamed: string[] = [];
      const visitNode = (node: { role: string; name?: string; children?: unknown[] }): void => {
        if (/^(button|slider|checkbox|radio|combobox|textbox|tab|gridcell|link|grid|group)$/.test(node.role) && !node.name) unnamed.push(node.role);
        for (const child of (node.children ?? []) as (typeof node)[]) visitNode(child);
      };
      visitNode(tree!);
      assert.deepEqual(unnamed, [], part);
    }
    await page.click("#tab-simplex");
    await page.waitForSelector("#simplex:not([hidden])");
    await visit.focus("#tab-simplex");
    const places = new Set<string>();
    for (let press = 0; press < 11; press++) {
      await page.keyboard.press("Tab");
      const [where, ring] = await page.evaluate(() => {
        const one = document.activeElement!;
        const shown = one.matches(".handle") ? one.querySelector(".ring")! : one.matches(".choice input") ? one.nextElementSibling! : one;
        const style = getComputedStyle(shown);
        return [`${one.closest("[id]")!.id} ${one.textContent}`, style.outlineStyle !== "none" || style.stroke !== "none"] as const;
      });
      places.add(where);
      assert.ok(ring, where);
    }
    assert.equal(places.size, 11, [...places].join());
  }));

test("a film plays, unless the reader asked for less motion", async () => {
  await visiting(`${address}#digits`, { still: false }, async (visit) => {
    const { page } = visit;
    await page.waitForFunction(() => document.querySelector("#digits-player button")?.textContent === "Pause", { polling: 10 });
    const seen = new Set<string>();
    while ((await visit.text("#digits-player button")) === "Pause") seen.add(await visit.text("#digits-player output"));
    assert.ok(seen.size > 5 && (await visit.text("#digits-player output")) === "finished");
    await page.click("#digits-player button");
    assert.equal(await visit.text("#digits-player button"), "Pause");
    await visit.focus("#digits-player input");
    await page.keyboard.press("End");
    await page.keyboard.press("Home");
    assert.match(await visit.text("#digits-player output"), /^0 of 17, t = 1\.00$/);
    assert.equal(await visit.text("#digits-player button"), "Play");
  });
  await visiting(`${address}#text`, { still: true }, async (visit) => {
    await visit.page.waitForFunction(() => document.querySelector("#text-player output")?.textContent === "finished", { polling: 20 });
    assert.equal(await visit.text("#text-player button"), "Play");
  });
});
