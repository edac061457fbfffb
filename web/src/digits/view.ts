/** The second part of the page: M2S and SEDD draw digits from the same noise. */
import { byId, format, html, svg } from "../dom";
import { Player } from "../player";
import { load } from "../sampling/client";
import { Film } from "../sampling/film";
import { CLASS_NAMES } from "../simplex/uniform";
import { countClasses, drawPixel, drawShares } from "./charts";
import type { PixelRow } from "./charts";
import type { Cell } from "./image";
import { ImageGrid, LEVELS, SIDE } from "./image";

const PIXELS = SIDE * SIDE;
const PAINTS = [16, 12, 8, 4, 0];
const WAIT_MS = 120; // after the last painted pixel

/** One of the two networks, with its places on the page. */
interface Side {
  name: string;
  film: Film;
  grid: ImageGrid;
  shares: SVGElement;
  text: HTMLElement;
}

/** Builds the second part and draws the first sample. */
export function startDigits(): void {
  new Digits();
}

class Digits {
  private readonly clamp = new Int32Array(PIXELS).fill(-1);
  private readonly painted: ImageGrid;
  private readonly sides: Side[];
  private readonly player: Player;
  private readonly repair = byId<HTMLInputElement>("digits-repair");
  private readonly classes = byId<HTMLInputElement>("digits-classes");
  private readonly steps = byId<HTMLSelectElement>("digits-steps");
  private readonly status = byId("digits-status");
  private pixel = 27;
  private paint = 0;
  private sample = 0;
  private timer = 0;

  constructor() {
    const visit = (index: number): void => {
      this.pixel = index;
      this.show();
    };
    this.painted = new ImageGrid(byId("paint"), "Pixels to paint", {
      visit,
      paint: (index) => this.fix(index, PAINTS[this.paint]),
      free: (index) => this.fix(index, -1),
    });
    this.sides = [
      ["m2s", "M2S", "digits-m2s-offset"],
      ["sedd", "SEDD", "digits-sedd"],
    ].map(([id, name, network]) => {
      const shares = svg("svg", { viewBox: "0 0 240 52", "aria-hidden": "true" });
      byId(`shares-${id}`).append(shares);
      const grid = new ImageGrid(byId(`image-${id}`), `Image of ${name}`, { visit });
      return { name, film: new Film(network), grid, shares, text: byId(`text-${id}`) };
    });
    this.player = new Player(byId("digits-player"), () => this.show());
    this.addPalette();
    this.addControls();
    this.status.textContent = "Loading the networks.";
    Promise.all(this.sides.map(({ film }) => load(film.name))).then(
      () => this.draw(true),
      (error: Error) => this.fail(error.message),
    );
  }

  private addPalette(): void {
    PAINTS.forEach((level, i) => {
      const input = html("input", { type: "radio", name: "level", value: i, checked: i === this.paint, "aria-label": `level ${level} of 16` });
      input.addEventListener("change", () => (this.paint = i));
      const swatch = html("span", { class: "swatch", style: `--level: ${(100 * level) / (LEVELS - 1)}%` });
      byId("palette").append(html("label", {}, input, swatch));
    });
  }

  private addControls(): void {
    this.steps.addEventListener("change", () => this.draw(true));
    this.repair.addEventListener("change", () => this.draw(false));
    this.classes.addEventListener("change", () => this.show());
    byId("digits-noise").addEventListener("click", () => {
      this.sample++;
      this.draw(true);
    });
    byId("paint-clear").addEventListener("click", () => {
      this.clamp.fill(-1);
      this.draw(false);
    });
    byId("digits-legend").append(
      ...[3, 2, 1, 0].map((kind) => html("span", { class: "item" }, html("span", { class: `cell class-${kind}` }), ` ${CLASS_NAMES[kind]}`)),
    );
    this.show();
  }

  /** Fixes a pixel, or frees it, and draws again soon. */
  private fix(index: number, level: number): void {
    if (this.clamp[index] === level) return;
    this.clamp[index] = level;
    this.status.textContent = "Sampling.";
    this.show();
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.draw(false), WAIT_MS);
  }

  /** Draws a sample with both networks, and plays it from the start where that is asked for. */
  private draw(fromStart: boolean): void {
    const steps = Number(this.steps.value);
    this.status.textContent = "Sampling.";
    this.player.restart(steps + 2, fromStart);
    for (const { film } of this.sides) {
      const settings = { steps, seed: 0, sample: this.sample, repair: this.repair.checked, temperature: 1, clamp: this.clamp.slice() };
      film.draw(settings, steps + 2, () => this.arrived(), (message) => this.fail(message));
    }
    byId("repaired-mark").hidden = !this.repair.checked;
    this.show();
  }

  private arrived(): void {
    const isComplete = this.sides.every(({ film }) => film.isComplete);
    if (isComplete) this.status.textContent = "";
    this.show();
  }

  private fail(message: string): void {
    this.status.textContent = message;
    this.status.classList.add("failure");
  }

  /** Shows the current step of both networks. */
  private show(): void {
    const { clamp, pixel, player } = this;
    const painted = Array.from(clamp, (level): Cell => {
      return { level, class: -1, isFixed: level >= 0, text: level < 0 ? "free" : `fixed at level ${level} of 16` };
    });
    this.painted.update(painted, pixel);
    for (const side of this.sides) this.showSide(side);
    const available = Math.min(...this.sides.map(({ film }) => (film.isComplete ? Infinity : film.available)));
    const frame = this.sides[1].film.at(player.index);
    player.update(available, frame?.t ?? 1);
    this.showPixel();
  }

  private showSide({ film, grid, shares, text }: Side): void {
    const frame = film.at(this.player.index);
    if (!frame) {
      grid.update(Array<Cell>(PIXELS).fill({ level: 0, class: -1, isFixed: false, text: "not computed yet" }), -1);
      return;
    }
    const { prediction, tokens } = frame;
    const cells = Array.from(tokens, (token, i): Cell => {
      const isFixed = this.clamp[i] >= 0;
      const level = isFixed ? this.clamp[i] : token;
      const kind = prediction && !isFixed ? prediction.classes[i] : -1; // no step uses the score of a fixed pixel
      const said = kind >= 0 ? `level ${level} of 16, ${CLASS_NAMES[kind]}` : `level ${level} of 16`;
      return { level, class: this.classes.checked ? kind : -1, isFixed, text: isFixed ? `${said}, fixed` : said };
    });
    grid.update(cells, this.pixel);
    drawShares(shares, film.frames, this.clamp, film.count, this.player.index);
    text.textContent = prediction ? describeClasses(countClasses(frame, this.clamp), prediction.droppedMass) : describeSample(film, this.clamp);
  }

  private showPixel(): void {
    const { pixel } = this;
    const title = `Pixel in row ${Math.floor(pixel / SIDE) + 1}, column ${(pixel % SIDE) + 1}`;
    byId("pixel-title").textContent = title;
    const predictions = this.sides.map(({ film }) => film.predictionAt(this.player.index));
    if (!predictions.every(Boolean)) return;
    const rows = predictions.map((prediction, i): PixelRow => {
      const values = prediction?.probabilities.subarray(pixel * LEVELS, (pixel + 1) * LEVELS) ?? [];
      return { name: this.sides[i].name, values, isSigned: i === 1 && !this.repair.checked };
    });
    const frame = this.sides[1].film.at(this.player.index);
    drawPixel(byId<SVGElement>("pixel-chart"), rows, frame?.tokens[pixel] ?? 0);
    const least = Math.min(...Array.from(rows[1].values));
    const kind = CLASS_NAMES[predictions[1]?.classes[pixel] ?? 3];
    byId("pixel-text").textContent =
      `What the networks predict${frame?.prediction ? "" : " in the last step"}, for levels 0 to 16. The mark is the current level. ` +
      (this.clamp[pixel] >= 0
        ? "The pixel is fixed, so no step uses these numbers."
        : least < -1e-6
          ? `SEDD is ${kind}: its signed posterior falls to ${format(least, least > -0.001 ? 6 : 3)}.`
          : `SEDD is ${kind} here.`);
  }
}

/** Says how many pixels have a posterior at a step. */
function describeClasses(counts: readonly number[], dropped: number): string {
  const total = counts.reduce((sum, one) => sum + one, 0);
  const without = counts[0] + counts[1];
  if (total === 0) return "All pixels are fixed.";
  if (without === 0) return `All ${total} scores have a posterior.`;
  const weights = dropped > 0 ? `The sampler drops a negative mass of ${dropped.toPrecision(2)}.` : "No weight is negative.";
  return `${without} of ${total} scores have no posterior: ${counts[0]} outside the box, ${counts[1]} in it. ${weights}`;
}

/** Says the same about all steps of a sample. */
function describeSample(film: Film, clamp: ArrayLike<number>): string {
  const counts = [0, 0, 0, 0];
  let dropped = 0;
  for (const frame of film.frames) {
    countClasses(frame, clamp).forEach((one, kind) => (counts[kind] += one));
    dropped += frame.prediction?.droppedMass ?? 0;
  }
  const total = counts.reduce((sum, one) => sum + one, 0);
  if (total === 0) return "All pixels are fixed.";
  const share = Math.round((100 * (counts[0] + counts[1])) / total);
  if (counts[0] + counts[1] === 0) return "In all steps every score had a posterior.";
  return `In all steps ${share} % of the scores had no posterior. The sampler dropped a negative mass of ${format(dropped)}.`;
}
