/** Computes samples for the page: one step at a time, so that a newer request ends an older one between two steps. */

import { decodeWeights, makeModel, type Model } from "../net/index";
import type { Frame, Reply, Request } from "./protocol";
import { frameCount, frames } from "./trajectory";

interface Run {
  run: number;
  index: number;
  count: number;
  frames: Generator<Frame>;
}

/** Answers requests. Networks that were asked for at the same time take steps in turn. */
export class Scheduler {
  private readonly models = new Map<string, Model>();
  private readonly runs = new Map<string, Run>();
  private isScheduled = false;

  /**
   * @param reply Sends an answer to the page.
   * @param later Calls a function after the messages that have arrived by then.
   */
  constructor(
    private readonly reply: (reply: Reply) => void,
    private readonly later: (call: () => void) => void,
  ) {}

  /** Takes a request. */
  receive(request: Request): void {
    const { name } = request;
    try {
      if (request.kind === "load") {
        const weights = decodeWeights(request.weights);
        const model = makeModel(weights);
        this.models.set(name, model);
        this.reply({ kind: "loaded", name, length: model.length, states: model.states, config: weights.config });
        return;
      }
      const model = this.models.get(name);
      if (model === undefined) throw new Error(`the network ${name} is not loaded`);
      const { run, settings } = request;
      this.runs.delete(name); // a new request goes to the end of the line
      this.runs.set(name, { run, index: 0, count: frameCount(model, settings.steps), frames: frames(model, settings) });
      this.schedule();
    } catch (error) {
      this.fail(name, error);
    }
  }

  private schedule(): void {
    if (this.isScheduled || this.runs.size === 0) return;
    this.isScheduled = true;
    this.later(() => {
      this.isScheduled = false;
      for (const [name, run] of this.runs) this.advance(name, run);
      this.schedule();
    });
  }

  private advance(name: string, run: Run): void {
    try {
      const next = run.frames.next();
      if (next.done) {
        this.runs.delete(name);
        return;
      }
      const { index, count } = run;
      run.index++;
      this.reply({ kind: "frame", name, run: run.run, index, count, frame: next.value });
    } catch (error) {
      this.runs.delete(name);
      this.fail(name, error);
    }
  }

  private fail(name: string, error: unknown): void {
    this.reply({ kind: "failed", name, message: error instanceof Error ? error.message : String(error) });
  }
}
