// The worker of the page: frames of a sample, cancellation and errors.
import assert from "node:assert/strict";
import { test } from "node:test";
import type { Reply, Settings } from "../../src/sampling/protocol";
import { Scheduler } from "../../src/sampling/scheduler";
import { format, readContainer, readGolden } from "./golden";

const SETTINGS: Settings = { steps: 8, seed: 0, sample: 0, repair: false, temperature: 1, clamp: null };

/** A scheduler, its replies, and what it has put off. */
class Page {
  readonly replies: Reply[] = [];
  readonly later: (() => void)[] = [];
  readonly scheduler = new Scheduler(
    (reply) => this.replies.push(reply),
    (call) => this.later.push(call),
  );

  load(name: string): void {
    this.scheduler.receive({ kind: "load", name, weights: readContainer(name).toString("base64") });
  }

  sample(name: string, run: number, settings: Partial<Settings> = {}): void {
    this.scheduler.receive({ kind: "sample", name, run, settings: { ...SETTINGS, ...settings } });
  }

  /** Does what was put off, at most `limit` times. */
  work(limit = Infinity): void {
    for (let i = 0; i < limit && this.later.length > 0; i++) this.later.shift()?.();
  }

  frames(name: string, run: number): Extract<Reply, { kind: "frame" }>[] {
    return this.replies.filter((reply) => reply.kind === "frame" && reply.name === name && reply.run === run) as never;
  }
}

test("the frames of two networks are the states of the library", () => {
  const page = new Page();
  const names = ["digits-m2s-offset", "digits-sedd"];
  for (const name of names) page.load(name);
  assert.deepEqual(
    page.replies.map((reply) => reply.kind === "loaded" && [reply.length, reply.states]),
    [[64, 17], [64, 17]],
  );
  for (const name of names) page.sample(name, 1);
  page.work();
  for (const name of names) {
    const expected = readGolden(name).samples[0].states[0];
    const frames = page.frames(name, 1);
    assert.deepEqual(frames.map(({ frame }) => format(frame.tokens)), expected);
    assert.deepEqual(frames.map(({ index }) => index), expected.map((_, i) => i));
    assert.ok(frames.every(({ count }) => count === expected.length));
    assert.deepEqual(frames.map(({ frame }) => frame.prediction === null), expected.map((_, i) => i === expected.length - 1));
  }
  assert.equal(page.later.length, 0);
});

test("a newer request ends the older one", () => {
  const page = new Page();
  page.load("digits-sedd");
  page.sample("digits-sedd", 1);
  page.work(3);
  page.sample("digits-sedd", 2, { steps: 2 });
  page.work();
  assert.equal(page.frames("digits-sedd", 1).length, 3);
  assert.deepEqual(page.frames("digits-sedd", 2).map(({ index }) => index), [0, 1, 2, 3]);
});

test("errors name the network and leave the others at work", () => {
  const page = new Page();
  page.load("digits-sedd");
  page.sample("chars", 1);
  page.scheduler.receive({ kind: "load", name: "chars", weights: "" });
  page.sample("digits-sedd", 2, { temperature: 0.5 });
  page.sample("digits-sedd", 3, { steps: 1 });
  page.work();
  page.sample("digits-sedd", 4, { temperature: 0.5 });
  page.work();
  const failed = page.replies.flatMap((reply) => (reply.kind === "failed" ? [[reply.name, reply.message]] : []));
  assert.deepEqual(failed.map(([name]) => name), ["chars", "chars", "digits-sedd"]);
  assert.match(failed[0][1], /not loaded/);
  assert.match(failed[1][1], /fewer than they state/);
  assert.match(failed[2][1], /switch repair on/);
  assert.equal(page.frames("digits-sedd", 3).length, 3);
});
