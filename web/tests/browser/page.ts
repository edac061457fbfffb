// The lab in headless Chromium, from the disk or from a server.
import { existsSync } from "node:fs";
import { pathToFileURL } from "node:url";
import puppeteer, { type Browser, type Page } from "puppeteer-core";

/** Folder that `m2s lab --out` wrote, and the address of a running `m2s lab`. The test of Python sets both. */
const { LAB_FOLDER, LAB_ADDRESS, CHROME } = process.env;
const CHROMES = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

/** The addresses of the lab: from the disk, and from the server. */
export function addresses(): string[] {
  if (!LAB_FOLDER || !LAB_ADDRESS) throw new Error("set LAB_FOLDER to what m2s lab --out wrote, and LAB_ADDRESS to a running m2s lab");
  return [pathToFileURL(`${LAB_FOLDER}/index.html`).href, LAB_ADDRESS];
}

/** Starts a browser. */
export async function launch(): Promise<Browser> {
  const executablePath = [CHROME, ...CHROMES].find((path) => path && existsSync(path));
  if (!executablePath) throw new Error("no browser: apt-get install chromium, or set CHROME to the path of one");
  return puppeteer.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
}

/** What a visit can differ in. */
export interface Options {
  width?: number;
  dark?: boolean;
  still?: boolean;
  touch?: boolean;
}

/** A page with everything that it requested and that its console said. */
export class Visit {
  readonly requests: string[] = [];
  readonly problems: string[] = [];

  private constructor(readonly page: Page) {
    page.on("request", (request) => this.requests.push(request.url()));
    page.on("requestfailed", (request) => this.problems.push(`failed: ${request.url()}`));
    page.on("console", (message) => this.problems.push(message.text()));
    page.on("pageerror", (error) => this.problems.push(String(error)));
  }

  /** Opens an address. The browser's storage is empty. */
  static async open(browser: Browser, address: string, { width = 1280, dark = false, still = true, touch = false }: Options = {}): Promise<Visit> {
    const context = await browser.createBrowserContext();
    const visit = new Visit(await context.newPage());
    await visit.page.setViewport({ width, height: 900, hasTouch: touch, isMobile: touch });
    await visit.page.emulateMediaFeatures([
      { name: "prefers-color-scheme", value: dark ? "dark" : "light" },
      { name: "prefers-reduced-motion", value: still ? "reduce" : "no-preference" },
    ]);
    // tsx names functions by a helper, which functions that run in the page then need.
    await visit.page.evaluateOnNewDocument("globalThis.__name = (named) => named;");
    await visit.page.goto(address);
    return visit;
  }

  /** The names of the scripts of weights that were requested. */
  weights(): string[] {
    return this.requests.flatMap((url) => /weights-([\w-]+)\.js$/.exec(url)?.[1] ?? []).sort();
  }

  /** The text of the element. */
  async text(selector: string): Promise<string> {
    return this.page.$eval(selector, (element) => element.textContent ?? "");
  }

  /** The numbers beside the bars of a card. */
  async bars(selector: string): Promise<number[]> {
    const texts = await this.page.$$eval(`${selector} .bar-line span`, (spans) => spans.map((span) => span.textContent ?? ""));
    return texts.map((text) => Number(text.replace("\u2212", "-")));
  }

  /** Moves a finger from one place to another, frame by frame. It rests at the end, so that the browser sees no fling. */
  async swipe(from: [number, number], to: [number, number]): Promise<void> {
    const { touchscreen } = this.page;
    const frame = (): Promise<unknown> => this.page.evaluate(() => new Promise((resolve) => requestAnimationFrame(resolve)));
    await touchscreen.touchStart(...from);
    for (let part = 1; part <= 20; part++) {
      const at = Math.min(1, part / 8);
      await touchscreen.touchMove(from[0] + at * (to[0] - from[0]), from[1] + at * (to[1] - from[1]));
      await frame();
    }
    await touchscreen.touchEnd();
  }

  /** Focuses an element, also of a picture. */
  async focus(selector: string): Promise<void> {
    await this.page.$eval(selector, (element) => (element as HTMLElement | SVGElement).focus());
  }

  /** An attribute of every element. */
  async attributes(selector: string, name: string): Promise<string[]> {
    return this.page.$$eval(selector, (elements, wanted) => elements.map((element) => element.getAttribute(wanted) ?? ""), name);
  }

  /** The middle of an element in the window, which scrolls where it must. */
  async middle(selector: string, index = 0): Promise<[number, number]> {
    return this.page.$$eval(
      selector,
      (elements, at) => {
        const around = elements[at].getBoundingClientRect();
        if (around.top < 180 || around.bottom > innerHeight) elements[at].scrollIntoView({ block: "center" });
        const box = elements[at].getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2] as [number, number];
      },
      index,
    );
  }

  /** Sets a control as a reader would, by its value. */
  async choose(selector: string, value: string): Promise<void> {
    await this.page.$eval(
      selector,
      (element, to) => {
        (element as HTMLInputElement).value = to;
        for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, { bubbles: true }));
      },
      value,
    );
  }

  /** Waits until a part shows its finished sample. */
  async finished(part: "digits" | "text"): Promise<void> {
    await this.page.waitForFunction(
      (name) =>
        document.querySelector(`#${name}-status`)?.textContent === "" &&
        document.querySelector(`#${name}-player output`)?.textContent === "finished",
      { polling: 20 },
      part,
    );
  }

  /** Closes the page. */
  async close(): Promise<void> {
    await this.page.browserContext().close();
  }
}
