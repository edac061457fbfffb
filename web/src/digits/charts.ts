/** Two small charts: the classes of all pixels over the steps, and the posterior of one pixel. */
import { format, set, svg } from "../dom";
import type { Frame } from "../sampling/protocol";
import { CLASS_NAMES } from "../simplex/uniform";
import { LEVELS } from "./image";

/** Returns how many pixels of a frame have each class. Fixed pixels do not count: no step uses their scores. */
export function countClasses(frame: Frame, clamp: ArrayLike<number>): number[] {
  const counts = CLASS_NAMES.map(() => 0);
  frame.prediction?.classes.forEach((one, pixel) => (counts[one] += Number(clamp[pixel] < 0)));
  return counts;
}

/** Draws one column for each step: the shares of the classes, realizable at the bottom. */
export function drawShares(target: SVGElement, frames: readonly Frame[], clamp: ArrayLike<number>, count: number, index: number): void {
  const width = 240 / count;
  const columns = frames.flatMap((frame, i) => {
    if (!frame.prediction) return [];
    const counts = countClasses(frame, clamp);
    const total = counts.reduce((sum, one) => sum + one, 0);
    let y = 0;
    return counts.flatMap((one, kind) => {
      const height = (44 * one) / total;
      y += height;
      if (one === 0) return [];
      return [svg("rect", { class: `share-${kind}`, x: i * width, y: y - height, width: Math.max(0.5, width - 0.6), height })];
    });
  });
  const place = Math.min(index, count - 1) * width + width / 2;
  target.replaceChildren(...columns, svg("path", { class: "now", d: `M${place - 4} 51L${place + 4} 51L${place} 45.5Z` }));
}

/** One row of the chart of a pixel. */
export interface PixelRow {
  name: string;
  values: ArrayLike<number>;
  /** Whether the values are those of a network without posterior. */
  isSigned: boolean;
}

/** Draws the posterior of one pixel under each network: one bar for each gray level, below the axis where it is negative. */
export function drawPixel(target: SVGElement, rows: readonly PixelRow[], current: number): void {
  const parts: SVGElement[] = [];
  rows.forEach(({ name, values, isSigned }, row) => {
    const numbers = Array.from(values);
    const high = Math.max(0.25, ...numbers);
    const low = Math.min(0, ...numbers);
    const [top, height, width] = [22 + row * 122, 84, 292 / LEVELS];
    const y = (value: number): number => top + (height * (high - value)) / (high - low);
    parts.push(svg("text", { x: 4, y: top - 8, class: "name" }, name));
    numbers.forEach((value, level) => {
      const kind = value < 0 ? "negative" : isSigned ? "signed" : "posterior";
      const [from, to] = [Math.min(y(0), y(value)), Math.max(y(0), y(value))];
      const size = { x: 4 + level * width + 1, y: from, width: width - 2, height: Math.max(0.6, to - from) };
      parts.push(svg("rect", { class: kind, ...size }));
    });
    parts.push(svg("line", { class: "zero", x1: 4, x2: 296, y1: y(0), y2: y(0) }));
    const best = numbers.indexOf(Math.max(...numbers));
    const label = { x: Math.min(280, Math.max(20, 4 + (best + 0.5) * width)), y: y(numbers[best]) - 3 };
    parts.push(svg("text", { ...label, "text-anchor": "middle", class: "value" }, format(numbers[best])));
    const mark = 4 + (current + 0.5) * width;
    parts.push(svg("path", { class: "now", d: `M${mark - 4} ${top + height + 9}L${mark + 4} ${top + height + 9}L${mark} ${top + height + 3}Z` }));
  });
  set(target, { viewBox: `0 0 300 ${rows.length * 122}` });
  target.replaceChildren(...parts);
}
