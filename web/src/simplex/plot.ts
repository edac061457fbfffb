// The two pictures: the plane of the scores, and the plane of the signed posteriors. The map between them is affine.
import { format, set, svg } from "../dom";
import type { Result } from "./state";
import { NAMES } from "./state";
import type { Vector } from "./uniform";
import * as uniform from "./uniform";

const SIZE = 400;
const LEFT = 38; // space for the labels of the axes
const BELOW = 34;
type Point = [number, number];

/** A map between scores and places in a picture. */
export interface View {
  place(score: Vector): Point;
  score(place: Point): number[];
}

/** Returns a score vector from its two coordinates. */
function scoreOf(result: Result, first: number, second: number): number[] {
  const score = [1, 1, 1];
  score[result.axes[0]] = first;
  score[result.axes[1]] = second;
  return score;
}

/** The plane of the two scores: from the lower left corner to `result.end` on both axes. */
export function planeView(result: Result): View {
  const width = SIZE - LEFT - 2;
  const height = SIZE - BELOW - 2;
  const { axes, end } = result;
  return {
    place: (score) => [LEFT + (score[axes[0]] / end) * width, SIZE - BELOW - (score[axes[1]] / end) * height],
    score: ([x, y]) => scoreOf(result, ((x - LEFT) / width) * end, ((SIZE - BELOW - y) / height) * end),
  };
}

/** The corners of the triangle of posteriors: certainty of k, and of the tokens on the two axes. */
const CORNERS: [Point, Point, Point] = [
  [84, 304],
  [288, 304],
  [186, 304 - 102 * Math.sqrt(3)],
];

/** The plane of the signed posteriors: barycentric coordinates. */
export function ternaryView(result: Result): View {
  const { k, axes, t } = result;
  const [origin, first, second] = CORNERS;
  return {
    place: (score) => {
      const mu = uniform.affineInverse(score, k, t);
      return [0, 1].map(
        (axis) => mu[k] * origin[axis] + mu[axes[0]] * first[axis] + mu[axes[1]] * second[axis],
      ) as Point;
    },
    score: ([x, y]) => {
      const b = (y - origin[1]) / (second[1] - origin[1]);
      const a = (x - origin[0] - b * (second[0] - origin[0])) / (first[0] - origin[0]);
      const mu = [0, 0, 0];
      mu[k] = 1 - a - b;
      mu[axes[0]] = a;
      mu[axes[1]] = b;
      return uniform.scoreFromPosterior(mu, k, t);
    },
  };
}

const text = ([x, y]: Point): string => `${x.toFixed(2)},${y.toFixed(2)}`;
const points = (view: View, scores: Vector[]): string => scores.map((score) => text(view.place(score))).join(" ");

/** A picture with its parts. `draw` moves them. */
export class Plot {
  readonly handle: SVGElement;
  private readonly ground = svg("polygon", { class: "ground" });
  private readonly box = svg("polygon", { class: "box" });
  private readonly triangle = svg("polygon", { class: "triangle" });
  private readonly contours = [0.05, 0.2, 0.5].map(() => svg("path", { class: "contour" }));
  private readonly repair = svg("line", { class: "repair" });
  private readonly exact = svg("path", { class: "exact", d: star(7.5, 3.2) });
  private readonly nearest = svg("circle", { class: "nearest", r: 5.5 });
  private readonly labels = svg("g", { "aria-hidden": "true" });

  constructor(
    readonly root: SVGSVGElement,
    readonly view: (result: Result) => View,
    private readonly isPlane: boolean,
  ) {
    const clip = `${root.id}-clip`;
    const frame = { x: isPlane ? LEFT : 0, y: 0, width: isPlane ? SIZE - LEFT : SIZE, height: isPlane ? SIZE - BELOW : SIZE };
    this.handle = svg(
      "g",
      { class: "handle", tabindex: "0", role: "slider" },
      svg("circle", { class: "reach", r: 22 }),
      svg("circle", { class: "ring", r: 15 }),
      svg("circle", { class: "mark", r: 9.5 }),
    );
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    inside.append(svg("rect", { class: isPlane ? "ground" : "page", ...frame, rx: 6 }));
    if (!isPlane) inside.append(this.ground);
    inside.append(this.box, this.triangle, ...this.contours);
    inside.append(this.labels, this.repair, this.exact, this.nearest);
    root.append(svg("clipPath", { id: clip }, svg("rect", { ...frame, rx: 6 })), inside, this.handle);
  }

  /** Moves everything to where a result has it. */
  draw(result: Result): void {
    const view = this.view(result);
    const { rho, axes, k } = result;
    const corner = (first: number, second: number): number[] => scoreOf(result, first, second);
    const certain = (z: number): number[] => uniform.scoreFromPosterior([0, 1, 2].map((one) => Number(one === z)), k, result.t);
    const far = 60 * result.end;
    set(this.ground, { points: points(view, [corner(0, 0), corner(far, 0), corner(far, far), corner(0, far)]) });
    set(this.box, { points: points(view, [corner(rho, rho), corner(1 / rho, rho), corner(1 / rho, 1 / rho), corner(rho, 1 / rho)]) });
    set(this.triangle, { points: points(view, [k, ...axes].map(certain)) });
    this.contours.forEach((path, i) => set(path, { d: contour(result, view, [0.05, 0.2, 0.5][i]) }));
    const [from, to] = [result.score, result.nearestScore].map((score) => view.place(score));
    const exists = result.diagnosis.class >= 2;
    set(this.repair, { x1: from[0], y1: from[1], x2: to[0], y2: to[1], visibility: exists ? "hidden" : "visible" });
    set(this.nearest, { cx: to[0], cy: to[1], visibility: exists ? "hidden" : "visible" });
    set(this.exact, { transform: `translate(${text(view.place(result.exact))})` });
    this.labels.replaceChildren(...(this.isPlane ? planeLabels(result, view) : ternaryLabels(result)));
    const [x, y] = [from[0], from[1]].map((value) => Math.min(SIZE - 8, Math.max(8, value)));
    set(this.handle, {
      transform: `translate(${text([x, y])})`,
      class: exists ? "handle" : "handle none",
      "aria-label": this.isPlane ? "Score, moved by the arrow keys" : "Signed posterior, moved by the arrow keys",
      "aria-valuemin": this.isPlane ? 0 : -2,
      "aria-valuemax": this.isPlane ? result.end.toFixed(3) : 2,
      "aria-valuenow": (this.isPlane ? result.score : result.diagnosis.signed)[axes[0]].toFixed(3),
      "aria-valuetext": this.spoken(result),
    });
  }

  /** What a screen reader says about the point. */
  private spoken({ axes, score, diagnosis }: Result): string {
    const values = this.isPlane ? axes.map((y) => `score of ${NAMES[y]} ${format(score[y])}`) : diagnosis.signed.map((value, z) => `${NAMES[z]} ${format(value)}`);
    return `${values.join(", ")}; ${uniform.CLASS_NAMES[diagnosis.class]}`;
  }
}

/** Returns the path of a star. */
function star(outer: number, inner: number): string {
  const corners = Array.from({ length: 10 }, (_, i): Point => {
    const [radius, angle] = [i % 2 ? inner : outer, (Math.PI * i) / 5];
    return [radius * Math.sin(angle), -radius * Math.cos(angle)];
  });
  return `M${corners.map(text).join("L")}Z`;
}

/** Returns the path of the scores whose excess score entropy is `level` nats: on every ray in the log-scores there is one. */
function contour(result: Result, view: View, level: number): string {
  const { axes, exact, k } = result;
  const places: Point[] = [];
  for (let i = 0; i < 120; i++) {
    const angle = (2 * Math.PI * i) / 120;
    const at = (radius: number): number[] =>
      scoreOf(result, exact[axes[0]] * Math.exp(radius * Math.cos(angle)), exact[axes[1]] * Math.exp(radius * Math.sin(angle)));
    let [low, high] = [0, 12];
    for (let j = 0; j < 40; j++) {
      const middle = (low + high) / 2;
      if (uniform.excess(at(middle), exact, k) < level) low = middle;
      else high = middle;
    }
    places.push(view.place(at(low)));
  }
  return `M${places.map(text).join("L")}Z`;
}

/** Returns the labels of the plane of scores. */
function planeLabels({ rho, axes, end, diagnosis }: Result, view: View): SVGElement[] {
  const at = (first: number, second: number): Point => {
    const score = [1, 1, 1];
    score[axes[0]] = first;
    score[axes[1]] = second;
    return view.place(score);
  };
  const [boxX, boxY] = at(1 / rho, 1 / rho);
  const [boxLeft] = at(rho, rho);
  const wide = boxX - boxLeft > 130;
  const center = (rho + 1 + 1 / rho) / 3; // of the triangle, on both axes
  const middle = at(center, center);
  return [
    ...(wide
      ? [
          svg("text", { x: boxX - 8, y: boxY + 18, "text-anchor": "end", class: "axis" }, "box"),
          svg("text", { x: middle[0], y: middle[1], "text-anchor": "middle", class: "halo" }, "posteriors"),
        ]
      : []),
    svg("text", { x: at(end, end)[0] - 8, y: 18, "text-anchor": "end", class: "axis" }, "all positive scores"),
    svg("text", { x: LEFT + 10, y: 20, class: diagnosis.class < 2 ? "class none" : "class" }, uniform.CLASS_NAMES[diagnosis.class]),
  ];
}

/** Returns the labels of the plane of posteriors. */
function ternaryLabels({ k, axes }: Result): SVGElement[] {
  const [origin, first, second] = CORNERS;
  return [
    svg("text", { x: origin[0] - 8, y: origin[1] + 18, "text-anchor": "end", class: "over" }, `certainly ${NAMES[k]}`),
    svg("text", { x: first[0] + 8, y: first[1] + 18, class: "over" }, `certainly ${NAMES[axes[0]]}`),
    svg("text", { x: second[0], y: second[1] - 14, "text-anchor": "middle", class: "over" }, `certainly ${NAMES[axes[1]]}`),
  ];
}

/** Draws the axes of the plane of scores, which lie outside its clip. */
export function drawAxes(target: SVGElement, result: Result): void {
  const view = planeView(result);
  const { rho, axes } = result;
  const marks: [number, string][] = rho > 0.6 ? [[1, "1"]] : [[rho, "ρ"], [1, "1"], [1 / rho, "1/ρ"]];
  const close = (1 - rho) / result.end < 0.05; // ρ and 1 would overlap
  const shown = close ? marks.filter(([, name]) => name !== "ρ") : marks;
  target.replaceChildren(
    ...shown.flatMap(([value, name]) => {
      const score = [value, value, value];
      const [x, y] = view.place(score);
      return [
        svg("text", { x, y: SIZE - BELOW + 15, "text-anchor": "middle", class: "axis" }, name),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end", class: "axis" }, name),
      ];
    }),
    svg("text", { x: (SIZE + LEFT) / 2, y: SIZE - 4, "text-anchor": "middle" }, `score of ${NAMES[axes[0]]}`),
    svg("text", { transform: `translate(12 ${(SIZE - BELOW) / 2}) rotate(-90)`, "text-anchor": "middle" }, `score of ${NAMES[axes[1]]}`),
  );
}
