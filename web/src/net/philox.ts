/**
 * Counter-based uniform numbers: Philox4x32-10 (Salmon et al. 2011) of (sample, step, position, purpose).
 *
 * They are the numbers of `m2s.ops.counter_noise`, bit for bit. So a sample does not depend on what else is drawn, and two
 * models can be run on the same noise.
 */

/** What a number is for. The order is that of the library. */
const PURPOSES = ["start", "route", "token", "jump", "order", "site", "time", "last"] as const;
const FIRST_PURPOSE = 10_000;
const ROUNDS = 10;

/** Purpose of a uniform number. */
export type Purpose = (typeof PURPOSES)[number];

/** Returns the upper 32 bits of the product of two numbers of 32 bits. */
function multiplyHigh(x: number, y: number): number {
  const [x0, x1, y0, y1] = [x & 0xffff, x >>> 16, y & 0xffff, y >>> 16];
  const middle = x1 * y0 + ((x0 * y0) >>> 16); // below 2^32: no bit is lost
  const carry = (middle & 0xffff) + x0 * y1;
  return (x1 * y1 + Math.floor(middle / 0x10000) + Math.floor(carry / 0x10000)) >>> 0;
}

/** Returns four random words of 32 bits for a counter of four words and a key of two. */
export function philox(counter: [number, number, number, number], key: [number, number]): [number, number, number, number] {
  let [a, b, c, d] = counter;
  let [low, high] = key;
  for (let round = 0; round < ROUNDS; round++) {
    [a, b, c, d] = [
      (multiplyHigh(0xcd9e8d57, c) ^ b ^ low) >>> 0,
      Math.imul(0xcd9e8d57, c) >>> 0,
      (multiplyHigh(0xd2511f53, a) ^ d ^ high) >>> 0,
      Math.imul(0xd2511f53, a) >>> 0,
    ];
    low = (low + 0x9e3779b9) >>> 0;
    high = (high + 0xbb67ae85) >>> 0;
  }
  return [a, b, c, d];
}

/** The uniform numbers of one step of one sample. */
export class CounterNoise {
  private readonly key: [number, number];

  /**
   * @param seed Seed of the run, below 2^53.
   * @param sample Number of the sample.
   * @param step Number of the step: 0 for the start, n + 1 for step n of the plan.
   */
  constructor(
    seed: number,
    private readonly sample: number,
    private readonly step: number,
  ) {
    this.key = [seed >>> 0, Math.floor(seed / 2 ** 32)];
  }

  /** Returns a number in [0, 1) with 53 random bits. */
  at(position: number, purpose: Purpose): number {
    const word = FIRST_PURPOSE + PURPOSES.indexOf(purpose);
    const [high, low] = philox([this.sample, this.step, position, word], this.key);
    return ((high >>> 5) * 2 ** 26 + (low >>> 6)) / 2 ** 53;
  }
}
