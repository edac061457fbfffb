// The first part of the page: one score of three tokens, and everything that follows from it.
import { showBars } from "../bars";
import { byId, format, html, isStill, svg } from "../dom";
import type { Place, Result } from "./state";
import { DATA, NAMES, STEPS, compute, factorsFor, scoreAt } from "./state";
import type { Choice } from "./state";
import { Plot, drawAxes, planeView, ternaryView } from "./plot";
import type { Vector } from "./uniform";
import { CLASS_NAMES, totalVariation } from "./uniform";

const VERDICTS = [
  "A coordinate is outside the box. It is impossible under any posterior.",
  "Each coordinate is possible, but not both together. No posterior has this score.",
  "Rounding separates this score from one of a posterior.",
  "A posterior has this score. It is the one shown here.",
];
const KEY_STEP = 0.01; // of the width of a picture
const MOVE_MS = 350;
const SNAP = 5; // a pointer as near as this to the exact score means it

/** Builds the first part. */
export function startSimplex(): void {
  const choice: Choice = { k: 2, t: 0.5, steps: 4, factors: [1, 1, 1] };
  const plots = [new Plot(byId("plane"), planeView, true), new Plot(byId("ternary"), ternaryView, false)];
  const axes = svg("g", { "aria-hidden": "true" });
  byId("plane").insertBefore(axes, plots[0].handle);
  let result = compute(choice);

  const draw = (): void => {
    result = compute(choice);
    drawAxes(axes, result);
    for (const plot of plots) plot.draw(result);
    describe(result);
  };
  const moveTo = (score: Vector): void => {
    choice.factors = factorsFor(choice, score);
    // The exact score has no error in other states either, where the factor of the current token acts.
    if (choice.factors.every((factor, y) => y === choice.k || Math.abs(factor - 1) < 1e-9)) choice.factors = [1, 1, 1];
    draw();
  };

  for (const plot of plots) {
    enableDragging(plot, () => result, moveTo);
    enableKeys(plot, () => result, moveTo);
  }
  addTokens(choice, draw);
  const time = byId<HTMLInputElement>("time");
  time.addEventListener("input", () => {
    choice.t = Number(time.value);
    draw();
  });
  const steps = byId<HTMLInputElement>("steps");
  steps.addEventListener("input", () => {
    choice.steps = STEPS[Number(steps.value)];
    draw();
  });
  byId("places").addEventListener("click", (event) => {
    const place = (event.target as HTMLElement).dataset.place as Place | undefined;
    if (!place) return;
    choice.factors = choice.factors.map((factor, y) => (y === choice.k ? 1 : factor)); // of an earlier current token
    glide(result.score, scoreAt(place, choice.k, choice.t), moveTo);
  });
  choice.factors = factorsFor(choice, scoreAt("material", choice.k, choice.t));
  draw();
}

/** Adds the choice of the current token. */
function addTokens(choice: Choice, draw: () => void): void {
  const field = byId("token");
  NAMES.forEach((name, k) => {
    const input = html("input", { type: "radio", name: "token", value: k, checked: k === choice.k });
    input.addEventListener("change", () => {
      choice.k = k;
      draw();
    });
    field.append(html("label", {}, input, html("span", {}, name)));
  });
}

/** Returns the place of a pointer in the coordinates of a picture. */
function placeOf(root: SVGSVGElement, event: PointerEvent): [number, number] {
  const box = root.getBoundingClientRect();
  return [((event.clientX - box.left) / box.width) * 400, ((event.clientY - box.top) / box.height) * 400];
}

/** Moves the score with a pointer: a press anywhere in the picture takes the point there. */
function enableDragging(plot: Plot, result: () => Result, moveTo: (score: Vector) => void): void {
  const { root } = plot;
  const follow = (event: PointerEvent): void => {
    const view = plot.view(result());
    const [x, y] = placeOf(root, event);
    const [exactX, exactY] = view.place(result().exact);
    moveTo(Math.hypot(x - exactX, y - exactY) < SNAP ? result().exact : view.score([x, y]));
  };
  root.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    root.setPointerCapture(event.pointerId);
    plot.handle.focus({ preventScroll: true });
    follow(event);
    event.preventDefault();
  });
  root.addEventListener("pointermove", (event) => {
    if (root.hasPointerCapture(event.pointerId)) follow(event);
  });
}

/** Moves the score with the arrow keys; Shift makes larger steps, Home goes back to the exact score. */
function enableKeys(plot: Plot, result: () => Result, moveTo: (score: Vector) => void): void {
  plot.handle.addEventListener("keydown", ((event: KeyboardEvent) => {
    const view = plot.view(result());
    const by = 400 * KEY_STEP * (event.shiftKey ? 5 : 1);
    const [x, y] = view.place(result().score);
    const targets: Record<string, () => Vector> = {
      ArrowLeft: () => view.score([x - by, y]),
      ArrowRight: () => view.score([x + by, y]),
      ArrowUp: () => view.score([x, y - by]),
      ArrowDown: () => view.score([x, y + by]),
      Home: () => result().exact,
    };
    const target = targets[event.key];
    if (!target) return;
    event.preventDefault();
    moveTo(target());
  }) as EventListener);
}

/** Moves the score to another place in a third of a second, or at once for readers who asked for less motion. */
function glide(from: Vector, to: Vector, moveTo: (score: Vector) => void): void {
  const start = performance.now();
  const frame = (now: number): void => {
    const part = isStill() ? 1 : Math.min(1, Math.max(0, (now - start) / MOVE_MS));
    const eased = part * part * (3 - 2 * part);
    moveTo(from.map((value, y) => value + eased * (to[y] - value)));
    if (part < 1) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

/** Writes the values beside the controls and the four cards. */
function describe(result: Result): void {
  const { diagnosis, steps, weights, generated, generatedRepaired } = result;
  byId("time-value").textContent = format(result.t);
  byId("steps-value").textContent = stepsText(steps);
  byId("steps").setAttribute("aria-valuetext", steps === Infinity ? "the limit of many steps" : `${steps} steps`);

  const verdict = byId("verdict");
  if (verdict.textContent !== CLASS_NAMES[diagnosis.class]) verdict.textContent = CLASS_NAMES[diagnosis.class];
  verdict.classList.toggle("none", diagnosis.class < 2);
  byId("verdict-text").textContent = VERDICTS[diagnosis.class];
  byId("loss").textContent = `The loss is ${format(result.loss, 3)} nats above its least value. It has no other sign of the error.`;

  showBars(byId("posterior-bars"), NAMES, [
    { kind: "as-is", name: "signed posterior", values: diagnosis.signed },
    { kind: "repaired", name: "nearest posterior", values: result.nearest },
  ]);
  showBars(byId("weight-bars"), NAMES, [{ kind: "as-is", name: "weight", values: weights }]);
  const dropped = weights.reduce((sum, weight) => sum - Math.min(0, weight), 0);
  byId("weight-text").textContent =
    steps === Infinity
      ? "An infinitely short step never has negative weights."
      : `Step from t = ${format(result.t)} to ${format(result.s)}. ` +
        (dropped > 0 ? `The sampler drops a negative mass of ${format(dropped, 3)}.` : "No weight is negative.");
  showBars(byId("generated-bars"), NAMES, [
    { kind: "data", name: "data", values: DATA },
    { kind: "as-is", name: "generated", values: generated },
    { kind: "repaired", name: "generated by repaired scores", values: generatedRepaired },
  ]);
  const distances = [generated, generatedRepaired].map((one) => format(totalVariation(one, DATA), 3));
  const isChanged = generated.some((value, y) => Math.abs(value - generatedRepaired[y]) > 5e-4);
  byId("generated-text").textContent =
    `Total variation from the data: ${distances[0]} as it is, ${distances[1]} repaired.` +
    (diagnosis.class >= 2 && isChanged ? " At other times and tokens the same error has no posterior, and repair changes it." : "");
}

/** Returns the number of steps as it is shown. */
function stepsText(steps: number): string {
  return steps === Infinity ? "∞" : String(steps);
}
