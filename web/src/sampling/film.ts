/** The frames of the newest sample of one network. */
import { sample } from "./client";
import type { Frame, Prediction, Settings } from "./protocol";

/** Keeps the frames that are shown until a newer sample has the frame in question. */
export class Film {
  /** The frames that are shown. */
  frames: Frame[] = [];
  /** The number of frames of the newest sample. */
  count = 1;
  private incoming: Frame[] = [];

  constructor(readonly name: string) {}

  /** Whether all frames of the newest sample are there. */
  get isComplete(): boolean {
    return this.incoming.length === this.count;
  }

  /** The number of frames of the newest sample that are there. */
  get available(): number {
    return this.incoming.length;
  }

  /** Draws a new sample. `arrived` is called after each frame. */
  draw(settings: Settings, count: number, arrived: () => void, fail: (message: string) => void): void {
    this.incoming = [];
    this.count = count;
    const receive = (frame: Frame, _: number, total: number): void => {
      this.count = total;
      this.incoming.push(frame);
      arrived();
    };
    sample(this.name, settings, receive, fail);
  }

  /** Returns the prediction at an index; at the end, where there is no noise left, that of the step before. */
  predictionAt(index: number): Prediction | null {
    return this.at(index)?.prediction ?? this.frames.at(-2)?.prediction ?? null;
  }

  /** Returns the frame of an index, or the last one: a film may be one frame shorter than another. */
  at(index: number): Frame | null {
    const place = Math.min(index, this.count - 1);
    if (this.incoming.length > place) this.frames = this.incoming;
    return this.frames[Math.min(index, this.frames.length - 1)] ?? null;
  }
}
