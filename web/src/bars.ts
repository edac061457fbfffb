// Horizontal bars of signed numbers: one row for each label, one line for each series.
import { format, html } from "./dom";

export interface Series {
  /** Class of the line in the style sheet: "as-is", "repaired" or "data". */
  kind: string;
  /** What a screen reader calls the series. */
  name: string;
  values: ArrayLike<number>;
}

/** Shows bars in an element. The axis includes 0 and 1, and everything below 0. Lines are updated in place, so that they move. */
export function showBars(target: HTMLElement, labels: readonly string[], series: readonly Series[], digits = 3): void {
  const values = series.flatMap((one) => Array.from(one.values));
  const low = Math.max(-1, Math.min(0, ...values));
  const high = Math.min(2, Math.max(1, ...values));
  const place = (value: number): number => (100 * (Math.min(high, Math.max(low, value)) - low)) / (high - low);
  if (target.childElementCount !== labels.length) target.replaceChildren(...labels.map(() => html("div", { class: "bar-row" })));
  labels.forEach((label, i) => {
    const row = target.children[i];
    if (row.childElementCount !== 2 || row.lastElementChild?.childElementCount !== series.length) {
      row.replaceChildren(html("b"), html("div", {}, ...series.map(newLine)));
    }
    row.children[0].textContent = label;
    series.forEach((one, j) => {
      const line = row.children[1].children[j];
      const [track, number] = [line.children[0] as HTMLElement, line.children[1]];
      const bar = track.children[0] as HTMLElement;
      const value = one.values[i];
      line.className = `bar-line ${one.kind}${value < 0 ? " negative" : ""}`;
      track.style.setProperty("--zero", `${place(0)}%`);
      bar.style.left = `${Math.min(place(0), place(value))}%`;
      bar.style.width = `${Math.abs(place(value) - place(0))}%`;
      number.textContent = format(value, digits);
      number.setAttribute("aria-label", `${label}, ${one.name}: ${format(value, digits)}`);
    });
  });
}

/** Returns an empty line: the track with its bar, and the number. */
function newLine(): HTMLElement {
  return html("div", { class: "bar-line" }, html("i", { "aria-hidden": "true" }, html("em")), html("span", { role: "img" }));
}
