/** The control of the step: a button that plays, a slider, and the time. */
import { format, html, isStill, set } from "./dom";

const FRAME_MS = 110;
const LONGEST_MS = 5000; // of a film with many frames

/** Plays the frames of a sample, as far as they are computed. */
export class Player {
  index = 0;
  private count = 1;
  private available = 0;
  private timer = 0;
  private readonly button = html("button", { type: "button", class: "play" }, "Play");
  private readonly slider = html("input", { type: "range", min: 0, max: 0, step: 1, value: 0 }) as HTMLInputElement;
  private readonly output = html("output");

  constructor(
    root: HTMLElement,
    private readonly show: () => void,
  ) {
    const hint = html("small", {}, "The left end is noise, the right end is the sample.");
    this.slider.id = `${root.id}-step`; // the label names the slider, and not the output that it holds
    root.append(this.button, html("label", { class: "slider", for: this.slider.id }, "Step ", this.output, this.slider, hint));
    this.slider.addEventListener("input", () => {
      this.stop();
      this.moveTo(Number(this.slider.value));
    });
    this.button.addEventListener("click", () => (this.isPlaying ? this.stop() : this.play()));
  }

  get isPlaying(): boolean {
    return this.timer !== 0;
  }

  /** Whether the last frame is shown. */
  get isAtEnd(): boolean {
    return this.index === this.count - 1;
  }

  /** Takes the number of frames of a new sample. A film that is at its end stays there. */
  restart(count: number, fromStart: boolean): void {
    const stays = this.isAtEnd && !fromStart;
    this.count = count;
    this.available = 0;
    set(this.slider, { max: count - 1 });
    if (stays) this.index = count - 1;
    if (!fromStart) return;
    if (isStill()) this.index = count - 1;
    else {
      this.index = 0;
      this.play();
    }
  }

  /** Takes the number of frames that are computed, and the time of the one that is shown. */
  update(available: number, t: number): void {
    this.available = available;
    this.slider.value = String(this.index);
    const last = this.count - 1;
    const place = this.isAtEnd ? "finished" : `${this.index} of ${last}, t = ${format(t)}`;
    const text = last === 0 ? "" : this.index < available ? place : `computing ${available} of ${last}`;
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }

  private play(): void {
    if (this.isAtEnd) this.index = 0;
    this.stop();
    const wait = Math.min(FRAME_MS, LONGEST_MS / this.count);
    this.timer = window.setInterval(() => {
      if (this.index + 1 < this.available) this.moveTo(this.index + 1);
      if (this.isAtEnd) this.stop();
    }, wait);
    this.button.textContent = "Pause";
    this.show();
  }

  private stop(): void {
    clearInterval(this.timer);
    this.timer = 0;
    this.button.textContent = "Play";
  }

  private moveTo(index: number): void {
    this.index = index;
    this.show();
  }
}
