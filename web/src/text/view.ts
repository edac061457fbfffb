/** The third part of the page: a network writes 128 characters. */
import { showBars } from "../bars";
import { byId, html, set } from "../dom";
import { Player } from "../player";
import { load } from "../sampling/client";
import { Film } from "../sampling/film";

const NETWORK = "chars";
const ALPHABET = " abcdefghijklmnopqrstuvwxyz";
const LENGTH = 128;
const SHOWN = 6; // predictions in the list

/** Builds the third part and draws the first sample. */
export function startText(): void {
  new TextPart();
}

class TextPart {
  private readonly clamp = new Int32Array(LENGTH).fill(-1);
  private readonly film = new Film(NETWORK);
  private readonly player: Player;
  private readonly cells: HTMLElement[];
  private readonly steps = byId<HTMLSelectElement>("text-steps");
  private readonly temperature = byId<HTMLInputElement>("temperature");
  private readonly prompt = byId<HTMLInputElement>("prompt");
  private readonly status = byId("text-status");
  private focused = 0;
  private visited = -1;
  private sample = 0;
  private isReady = false;

  constructor() {
    this.cells = Array.from({ length: LENGTH }, (_, i) => html("button", { type: "button", class: "character", tabindex: i ? -1 : 0 }));
    byId("characters").append(...this.cells);
    this.player = new Player(byId("text-player"), () => this.show());
    this.addCellEvents();
    this.addControls();
    this.status.textContent = "Loading the network.";
    load(NETWORK).then(
      () => {
        this.isReady = true;
        this.draw(true);
      },
      (error: Error) => this.fail(error.message),
    );
    this.show();
  }

  private addControls(): void {
    byId("text-again").addEventListener("click", () => this.draw(true));
    byId("text-noise").addEventListener("click", () => {
      this.sample++;
      this.draw(true);
    });
    byId("text-free").addEventListener("click", () => {
      this.clamp.fill(-1);
      this.prompt.value = "";
      this.draw(true);
    });
    this.steps.addEventListener("change", () => this.draw(true));
    this.temperature.addEventListener("input", () => {
      byId("temperature-value").textContent = Number(this.temperature.value).toFixed(2);
    });
    this.temperature.addEventListener("change", () => this.draw(true));
    let before = 0;
    this.prompt.addEventListener("input", () => {
      const text = this.prompt.value.toLowerCase().replace(/[^a-z ]/g, "");
      this.prompt.value = text;
      for (let i = 0; i < Math.max(before, text.length); i++) this.clamp[i] = i < text.length ? ALPHABET.indexOf(text[i]) : -1;
      before = text.length;
      this.changed();
    });
    this.prompt.addEventListener("change", () => this.draw(true));
  }

  private addCellEvents(): void {
    const root = byId("characters");
    const at = (event: Event): number => this.cells.indexOf(event.target as HTMLElement);
    root.addEventListener("click", (event) => this.toggle(at(event)));
    root.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse") this.visit(at(event));
    });
    root.addEventListener("focusin", (event) => {
      const index = at(event);
      if (index < 0) return;
      set(this.cells[this.focused], { tabindex: -1 });
      set(this.cells[index], { tabindex: 0 });
      this.focused = index;
      this.visit(index);
    });
    root.addEventListener("keydown", (event) => this.press(event));
  }

  private press(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { focused } = this;
    const columns = getComputedStyle(byId("characters")).gridTemplateColumns.split(" ").length;
    const moves: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -focused, End: LENGTH };
    const letter = event.key === "_" ? " " : event.key.toLowerCase();
    if (event.key in moves) this.focus(focused + moves[event.key]);
    else if (letter.length === 1 && (letter !== " " || event.key === "_") && ALPHABET.includes(letter)) {
      this.clamp[focused] = ALPHABET.indexOf(letter);
      this.focus(focused + 1);
      this.changed();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.clamp[focused] = -1;
      if (event.key === "Backspace") this.focus(focused - 1);
      this.changed();
    } else return;
    event.preventDefault();
  }

  private focus(index: number): void {
    this.cells[Math.min(LENGTH - 1, Math.max(0, index))].focus();
  }

  /** Fixes a character as it is shown, or frees it. */
  private toggle(index: number): void {
    const frame = this.film.at(this.player.index);
    if (index < 0 || !frame) return;
    this.clamp[index] = this.clamp[index] < 0 ? frame.tokens[index] : -1;
    this.changed();
  }

  /** Says that fixed characters wait for a new sample. */
  private changed(): void {
    const count = this.clamp.reduce((sum, one) => sum + Number(one >= 0), 0);
    const fixed = count === 0 ? "No character is" : count === 1 ? "1 character is" : `${count} characters are`;
    this.status.textContent = `${fixed} fixed. Sample again to see the text.`;
    this.show();
  }

  private visit(index: number): void {
    if (index < 0 || index === this.visited) return;
    this.visited = index;
    this.show();
  }

  private draw(fromStart: boolean): void {
    if (!this.isReady) return;
    const steps = Number(this.steps.value);
    const temperature = Number(this.temperature.value);
    this.status.textContent = "Sampling.";
    this.player.restart(steps + 1, fromStart);
    const settings = { steps, seed: 0, sample: this.sample, repair: false, temperature, clamp: this.clamp.slice() };
    this.film.draw(settings, steps + 1, () => this.arrived(), (message) => this.fail(message));
    this.show();
  }

  private arrived(): void {
    if (this.film.isComplete) this.status.textContent = "";
    this.show();
  }

  private fail(message: string): void {
    this.status.textContent = message;
    this.status.classList.add("failure");
  }

  /** Shows the current step. */
  private show(): void {
    const index = this.player.index;
    const frame = this.film.at(index);
    const before = this.film.frames[index - 1] ?? null;
    this.player.update(this.film.isComplete ? Infinity : this.film.available, frame?.t ?? 1);
    this.cells.forEach((cell, i) => {
      const isFixed = this.clamp[i] >= 0;
      const token = isFixed ? this.clamp[i] : (frame?.tokens[i] ?? 0);
      const sure = isFixed || !frame?.prediction ? 1 : frame.prediction.probabilities[i * ALPHABET.length + token];
      cell.textContent = token === 0 ? "\u00a0" : ALPHABET[token];
      cell.style.setProperty("--sure", `${Math.round(100 * sure)}%`);
      cell.classList.toggle("changed", !isFixed && before !== null && before.tokens[i] !== token);
      const name = token === 0 ? "space" : ALPHABET[token];
      set(cell, { "aria-pressed": String(isFixed), "aria-label": `${name}, position ${i + 1}${isFixed ? ", fixed" : ""}` });
    });
    byId("reading").textContent = this.cells.map((cell) => cell.textContent).join("").replaceAll("\u00a0", " ").trim();
    this.showPredictions();
  }

  private showPredictions(): void {
    const { visited } = this;
    if (visited < 0) return;
    byId("character-title").textContent = `Position ${visited + 1}`;
    const bars = byId("character-bars");
    const prediction = this.film.predictionAt(this.player.index);
    if (!prediction) return;
    const states = ALPHABET.length;
    const values = Array.from(prediction.probabilities.subarray(visited * states, (visited + 1) * states));
    const order = values.map((_, token) => token).sort((a, b) => values[b] - values[a]);
    const best = order.slice(0, SHOWN);
    const labels = best.map((token) => (token === 0 ? "\u2423" : ALPHABET[token]));
    showBars(bars, labels, [{ kind: "repaired", name: "probability", values: best.map((token) => values[token]) }]);
    byId("character-text").textContent = "The posterior of the clean character, given all 128 noisy ones.";
  }
}
