// The mathematics of the simplex against the Python library (golden/simplex.json) and against its own definitions.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { chainDistribution, limitDistribution } from "../src/simplex/generated";
import { DATA, LIVE_STEP } from "../src/simplex/state";
import type { Vector } from "../src/simplex/uniform";
import * as uniform from "../src/simplex/uniform";

interface Site {
  k: number;
  t: number;
  s: number;
  rho: number;
  nu: number[];
  posterior: number[];
  exact: number[];
  bridge: number[];
  score: number[];
  signed: number[];
  projected: number[];
  class: number;
  outside: number;
  lowest: number;
  weights: number[];
}
interface Golden {
  sites: Site[];
  chains: { factors: number[]; steps: number; projected: boolean; generated: number[] }[];
  limits: { distribution: number[]; y: number; factor: number; generated: [number[], number[]] }[];
}
const golden = JSON.parse(readFileSync(new URL("golden/simplex.json", import.meta.url), "utf8")) as Golden;
const TOLERANCE = 1e-12;

// The first step starts at alpha = 0.001, which multiplies rounding errors by a thousand for each entry of the step.
const CHAIN_TOLERANCE = 1e-10;

/** Fails unless two vectors agree, relative to the largest entry. */
function same(actual: Vector, expected: Vector, where: string, tolerance = TOLERANCE): void {
  assert.equal(actual.length, expected.length, where);
  const scale = Math.max(1, ...expected.map(Math.abs));
  actual.forEach((value, i) => {
    assert.ok(Math.abs(value - expected[i]) <= tolerance * scale, `${where}[${i}]: ${value} ${expected[i]}`);
  });
}

test("conversions, classes and projection are those of the library", () => {
  golden.sites.forEach((site, i) => {
    const { k, t, s } = site;
    same([uniform.rho(site.nu.length, t)], [site.rho], `rho ${i}`);
    same(uniform.posteriorFromLeaveOneOut(site.nu, k, t), site.posterior, `posterior ${i}`);
    same(uniform.scoreFromLeaveOneOut(site.nu, k, t), site.exact, `score ${i}`);
    same(uniform.scoreFromPosterior(site.projected, k, t), site.bridge, `bridge ${i}`);
    same(uniform.affineInverse(site.score, k, t), site.signed, `affine inverse ${i}`);
    same(uniform.project(site.score, k, t), site.projected, `projection ${i}`);
    same(uniform.analyticWeights(site.score, k, s, t), site.weights, `weights ${i}`);
    const found = uniform.diagnose(site.score, k, t);
    assert.deepEqual([found.class, found.outside], [site.class, site.outside], `class ${i}`);
    same([found.lowest], [site.lowest], `lowest ${i}`);
  });
  assert.deepEqual(new Set(golden.sites.map((site) => site.class)), new Set([0, 1, 2, 3]));
});

test("the affine inverse and the bridge invert each other", () => {
  for (const site of golden.sites) {
    same(uniform.scoreFromPosterior(site.signed, site.k, site.t), site.score, "bridge of the signed posterior");
    same(uniform.affineInverse(site.exact, site.k, site.t), site.posterior, "inverse of an exact score");
  }
});

test("the projection is the nearest point of a fine grid of posteriors", () => {
  const distance = (a: Vector, b: Vector): number => a.reduce((sum, value, i) => sum + (value - b[i]) ** 2, 0);
  for (const site of golden.sites.filter((one) => one.nu.length === 3).slice(0, 12)) {
    const nearest = distance(uniform.scoreFromPosterior(site.projected, site.k, site.t), site.score);
    for (let i = 0; i <= 60; i++) {
      for (let j = 0; j <= 60 - i; j++) {
        const mu = [i / 60, j / 60, (60 - i - j) / 60];
        assert.ok(distance(uniform.scoreFromPosterior(mu, site.k, site.t), site.score) >= nearest - TOLERANCE);
      }
    }
  }
});

test("chains of finitely many steps generate the distribution that the library's steps give", () => {
  const p = golden.limits[0].distribution;
  for (const chain of golden.chains) {
    const where = `${chain.factors.join()} ${chain.steps} ${chain.projected}`;
    same(chainDistribution(p, chain.factors, chain.steps, chain.projected), chain.generated, where, CHAIN_TOLERANCE);
  }
});

test("the limit of many steps is that of Figure 1", () => {
  for (const { distribution, y, factor, generated } of golden.limits) {
    const factors = [1, 1, 1];
    factors[y] = factor;
    [false, true].forEach((projected, i) => {
      same(limitDistribution(distribution, factors, projected, LIVE_STEP), generated[i], `${projected} ${factor}`);
    });
  }
});

test("the integrator of the page is exact to what the page shows", () => {
  for (const factors of [
    [1, 2.5, 1],
    [0.05, 12, 0.6],
    [8, 0.1, 3],
  ]) {
    for (const projected of [false, true]) {
      const [live, fine] = [LIVE_STEP, LIVE_STEP / 16].map((step) => limitDistribution(DATA, factors, projected, step));
      assert.ok(uniform.totalVariation(live, fine) < 5e-4, `${factors.join()} ${projected}`);
    }
  }
});

test("chains with many steps approach the limit", () => {
  const factors = [1, 2.5, 0.7];
  const limit = limitDistribution([0.5, 0.3, 0.2], factors, false, LIVE_STEP / 8);
  const distances = [32, 128, 512].map((steps) =>
    uniform.totalVariation(chainDistribution([0.5, 0.3, 0.2], factors, steps, false), limit),
  );
  assert.ok(distances[0] > 2 * distances[1] && distances[1] > 2 * distances[2], distances.join());
});
